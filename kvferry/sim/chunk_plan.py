"""Plans of long prompts, in which faults strike at the boundaries of chunks, while decode workers read what is sealed.

A run without faults shows when each chunk is announced. The same run is then played with faults at some of these moments: the
prefill or the decode worker dies, freezes or leaves, their link is cut, the client goes, or a pool has no room, so that prompts
are preempted.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

from msgspec.structs import replace as replace_struct

from core.testing.hash_model import expected_tokens
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import FIRST_REQUEST_S, draw_plan, draw_shape
from kvferry.sim.faults import Fault, FaultEvent
from kvferry.sim.plan import ClusterPlan, RequestPlan

_CHUNK_TOKENS = 16
_PROMPT_TOKENS = (64, 112)  # from, to
_OUTPUT_TOKENS = 8
_KINDS = (Fault.CRASH, Fault.FREEZE, Fault.CUT, Fault.DATA_PARTITION, Fault.DRAIN, Fault.TWIN, Fault.ABORT, Fault.JUMP)
_ANNOUNCED = re.compile(r"\s*([\d.]+) (\S+) +sends .*PrefillProgress\(")


def draw_chunk_plan(seed: int) -> ClusterPlan:
    """Return a run of long prompts, with one to three faults at boundaries of their chunks."""
    random = Random(f"{seed}/chunks")
    plan = _draw_calm_plan(seed, random)
    boundaries = chunk_boundaries(plan)
    for _ in range(random.randint(1, 3) if boundaries else 0):
        _strike(plan, random, *random.choice(boundaries))
    aborted = {event.targets[0]: event.at for event in plan.faults.events if event.kind is Fault.ABORT}
    plan.faults.events = [event for event in plan.faults.events if event.kind is not Fault.ABORT]
    requests = [
        replace(request, abort_at=max(request.at, aborted[request.name])) if request.name in aborted else request
        for request in plan.requests
    ]
    return replace(plan, requests=tuple(requests))


def chunk_boundaries(plan: ClusterPlan) -> list[tuple[float, str]]:
    """Return when each chunk of a run is announced, and by which prefill worker."""
    cluster = SimCluster(plan, keeps_log=True)
    found = [_ANNOUNCED.match(line) for line in cluster.run().log]
    return [(float(match[1]), match[2]) for match in found if match is not None]


def _draw_calm_plan(seed: int, random: Random) -> ClusterPlan:
    kinds = (Fault.PRESSURE,) if random.random() < 0.4 else ()
    plan = draw_plan(seed, kinds)
    scheduler = replace_struct(plan.config.scheduler, max_num_batched_tokens=_CHUNK_TOKENS, long_prefill_token_threshold=0)
    cache = replace_struct(plan.config.cache, enable_prefix_caching=True)
    router = replace_struct(plan.config.router, local_prefill_itl_ms=0.0)
    connector = replace_struct(plan.config.connector, early_pull=True)
    config = replace_struct(plan.config, scheduler=scheduler, cache=cache, router=router, connector=connector)
    shape = draw_shape(Random(f"{seed}/shape"), config)
    spare = random.randint(1, 6) if kinds else 60
    workers = [
        replace(worker, num_blocks=shape.num_needed(worker.block_size, scheduler) + spare, step_s=random.choice((0.01, 0.05)))
        for worker in plan.workers
        if worker.role != "aggregated"
    ]
    plan.faults.events = []
    documents = [[random.randrange(50_000) for _ in range(_PROMPT_TOKENS[1])] for _ in range(2)]
    requests = [_draw_request(plan, random, documents, index) for index in range(random.randint(2, 6))]
    return replace(
        plan,
        config=config,
        workers=tuple(workers),
        requests=tuple(requests),
        tier=None,
        images=None,
        embedding_store=None,
        step_loads=None,
        encoders=(),
    )


def _draw_request(plan: ClusterPlan, random: Random, documents: list[list[int]], index: int) -> RequestPlan:
    num_tokens, num_shared = random.randint(*_PROMPT_TOKENS), random.choice((0, 0, 32, 64))
    prompt = random.choice(documents)[:num_shared] + [random.randrange(50_000) for _ in range(num_tokens - num_shared)]
    return RequestPlan(
        name=f"r{index:02d}",
        at=FIRST_REQUEST_S + random.choice((0.0, 0.1, 0.5)) * index,
        prompt_token_ids=tuple(prompt),
        max_tokens=_OUTPUT_TOKENS,
        n=random.choice((1, 1, 1, 2)),
        cache_salt=random.choice(("", "", "tenant")),
        router=random.choice(plan.routers),
        expected=tuple(expected_tokens(prompt, _OUTPUT_TOKENS, attentions=plan.attentions)),
    )


def _strike(plan: ClusterPlan, random: Random, boundary: float, prefill: str) -> None:
    """Add a fault shortly before or after a boundary."""
    kind, at = random.choice(_KINDS), boundary + random.choice((-0.001, 0.0, 0.001, 0.005, 0.02))
    decode = random.choice([worker.engine_id for worker in plan.workers if worker.role == "decode"])
    if kind is Fault.ABORT:
        targets: tuple[str, ...] = (random.choice(plan.requests).name,)
    elif kind in {Fault.CUT, Fault.DATA_PARTITION}:
        targets = (decode, prefill)
    else:
        targets = (random.choice((prefill, prefill, decode)),)
    plan.faults.add(frozenset({kind}), [FaultEvent(at, kind, targets, random.choice((0.1, 0.5, 3.0)))])
