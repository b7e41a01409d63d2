"""Draws the plan of a simulated run from its seed: everything random about it that is not drawn while it runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random

from msgspec.structs import replace as replace_struct

from core.config import KVFerryConfig
from core.config_router import RouterSection
from core.config_workers import CacheSection, ConnectorSection, SchedulerSection, WorkerSection
from core.engine.kv_sizing import max_in_flight_tokens
from core.testing.hash_encoder import input_ids_of
from core.testing.hash_model import FULL, HashAttention, expected_tokens, hash_model_kv_config
from core.wire.messages import Role
from core.wire.pairing import verifies_digests
from kvferry.sim.faults import (
    GRAY_FAULTS,
    Fault,
    FaultSchedule,
    draw_faults,
    draw_gray_faults,
    draw_gray_kinds,
    draw_kinds,
)
from kvferry.sim.image_plan import ImagePlan, draw_images
from kvferry.sim.next_turns import draw_conversations
from kvferry.sim.plan import MAX_MODEL_LEN, ClusterPlan, RequestPlan, WorkerPlan, router_address
from kvferry.sim.slow_reading import SEND_TIMEOUT_S, draw_slow_readers
from kvferry.sim.step_loads import StepLoadPlan, draw_step_loads
from kvferry.sim.switch_plan import draw_switches
from kvferry.sim.tier_plan import TierPlan, draw_embedding_store, draw_tier

REQUESTS_WITHIN_S = 8.0  # all requests arrive in the first seconds
FIRST_REQUEST_S = 1.5  # by then the workers have registered
_BURSTS_S = (2.0, 3.0, 5.0)  # when many come at once
_MAX_RETRIES = (0, 2, 2)  # where no kinds of faults are given
_MAX_PROMPT_TOKENS = 80
_MAX_OUTPUT_TOKENS = 40
_ASYNC_SCHEDULING_SHARE = 0.2  # of runs in which a step stays in flight while the next one is scheduled
# Recorded defects are known to be found by other seeds than these, whose runs must stay as they were.
_EARLY_PULL_PERIOD, _PREFIXES_PERIOD = 8, 16  # of the seeds with early pulls, and with prefixes from peers as well
_EARLY_PULL_PLACE, _PREFIXES_PLACE = 1, 9
_LOCAL_PREFILL_SHARE = 0.3  # of runs in which decode workers may compute prompts
_LOCAL_PREFILL_ITL_MS = 1000.0
_ORDER_SHARE = 0.5  # of runs in which transports that can keep reads in order
_SUPERVISED_SHARE = 0.5
_MANY_TRANSPORTS_SHARE = 0.3
TRANSPORTS = ("tcp", "nixl", "shm")
_OTHER_LAYOUT_SHARE = 0.08  # of runs with workers of a second layout
_READER_OF_OTHER_LAYOUT_SHARE = 0.7  # of these, with a decode worker that can read them
_TWO_HOSTS_SHARE = 0.3  # of runs with a transport that needs no common memory
_HOSTS = ("host-0", "host-1")
_PLAIN_SHARE = 0.5  # of runs with full attention only, and of runs with blocks of one size
_OTHER_DTYPE = "bfloat16"
HYBRIDS = (  # no chunk ends within a block
    (HashAttention(), HashAttention(window=24)),
    (HashAttention(window=17), HashAttention(), HashAttention(window=40)),
    (HashAttention(window=48), HashAttention(window=48), HashAttention()),
    (HashAttention(window=20),),
    (HashAttention(chunk=64), HashAttention()),
)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the model's KV looks like, and how the workers cut it into blocks."""

    attentions: tuple[HashAttention, ...]
    block_sizes: tuple[int, ...]
    random: Random

    def draw_block_size(self) -> int:
        return self.random.choice(self.block_sizes)

    def num_needed(self, block_size: int, scheduler: SchedulerSection) -> int:
        """Return the smallest pool in which the longest request can run, the null block included."""
        config = hash_model_kv_config(2, block_size, self.attentions)
        num_tokens = _MAX_PROMPT_TOKENS + _MAX_OUTPUT_TOKENS
        return config.num_blocks_of_sequence(num_tokens, max_in_flight_tokens(scheduler), MAX_MODEL_LEN) + 1


@dataclass(frozen=True, slots=True)
class _Cluster:
    """The processes of a run, without encode workers, and its kinds of faults: drawn, or the ``chosen`` ones."""

    seed: int
    chosen: frozenset[Fault] | None
    kinds: frozenset[Fault]
    routers: tuple[str, ...]
    config: KVFerryConfig
    shape: _Shape
    workers: tuple[WorkerPlan, ...]
    has_other_layout: bool


def draw_plan(
    seed: int,
    chosen: Collection[Fault] | None = None,
    async_scheduling: bool | None = None,
    peer_prefixes: bool | None = None,
) -> ClusterPlan:
    """Return the plan of a seed, with the kinds of faults that it draws, or with all that are ``chosen``.

    Other kinds give another run, not a part of the same. ``async_scheduling`` and ``peer_prefixes`` are drawn where they are
    None.
    """
    random = Random(seed)
    cluster = _draw_cluster(seed, None if chosen is None else frozenset(chosen), async_scheduling, random)
    kinds, config, shape, workers = cluster.kinds, cluster.config, cluster.shape, cluster.workers
    requests = _draw_requests(random, kinds, cluster.routers, shape.attentions)
    if peer_prefixes is None:
        peer_prefixes = seed % _PREFIXES_PERIOD == _PREFIXES_PLACE
    if peer_prefixes:
        config = replace_struct(config, connector=replace_struct(config.connector, peer_prefixes=True))
        requests = draw_conversations(Random(f"{seed}/turns"), requests, shape.attentions)
    tier = draw_tier(seed, chosen, [worker.engine_id for worker in workers]) if config.cache.enable_prefix_caching else None
    if tier is not None:
        workers, requests = _let_tier_be_used(Random(f"{seed}/tier use"), shape, config, workers, requests)
    images = draw_images(seed)
    if images is not None:
        requests = tuple(_show_images(images, request, shape.attentions) for request in requests)
    requests = draw_slow_readers(seed, requests, is_wanted=_is_wanted(Fault.SLOW_CLIENT, chosen))
    moments = [request.at for request in requests]
    faults = _draw_all_faults(random, cluster, tier, moments)
    encoders = _draw_encoders(images, kinds) if images is not None else ()
    if images is not None:
        faults.add(frozenset(), images.draw_events([encoder.engine_id for encoder in encoders], moments))
    embedding_store = None
    if images is not None and images.connector == "shared" and (tier is None or tier.name != "store"):
        embedding_store = draw_embedding_store(seed, chosen, [worker.engine_id for worker in (*workers, *encoders)])
        faults.add(frozenset(), embedding_store.draw_events(moments))  # which are no cause of any error
    workers, config = draw_switches(seed, workers, config, faults, moments, is_wanted=_is_wanted(Fault.SWITCH, chosen))
    step_loads = draw_step_loads(seed, is_wanted=_is_wanted(Fault.STEP_LOAD, chosen))
    faults.add(_kinds_drawn_apart(requests, step_loads), [])
    return ClusterPlan(
        seed=seed,
        config=config,
        attentions=shape.attentions,
        routers=cluster.routers,
        workers=workers,
        requests=requests,
        faults=faults,
        max_rows_per_read=random.choice((1, 2, 100)),
        is_supervised=Random(f"{seed}/supervised").random() < _SUPERVISED_SHARE,
        keeps_order=Random(f"{seed}/order").random() < _ORDER_SHARE,
        tier=tier,
        images=images,
        embedding_store=embedding_store,
        step_loads=step_loads,
        encoders=encoders,
    )


def _draw_cluster(seed: int, chosen: frozenset[Fault] | None, async_scheduling: bool | None, random: Random) -> _Cluster:
    kinds = draw_kinds(random) if chosen is None else chosen
    routers = random.choice((("router-0",), ("router-0",), ("router-0", "router-1")))
    config = _draw_config(random, kinds, routers)
    if async_scheduling is None:
        async_scheduling = Random(f"{seed}/look ahead").random() < _ASYNC_SCHEDULING_SHARE
    if async_scheduling:
        config = replace_struct(config, scheduler=replace_struct(config.scheduler, async_scheduling="on"))
    early_pull = seed % _EARLY_PULL_PERIOD == _EARLY_PULL_PLACE
    config = replace_struct(config, connector=replace_struct(config.connector, early_pull=early_pull))
    shape = draw_shape(Random(f"{seed}/shape"), config)  # apart, so that all else is drawn as without
    workers = _draw_workers(random, kinds, config, shape)
    if chosen is None:
        config, workers = _draw_places(Random(f"{seed}/places"), config, workers)
        max_retries = Random(f"{seed}/retries").choice(_MAX_RETRIES)
        config = replace_struct(config, router=replace_struct(config.router, max_retries=max_retries))
        if Random(f"{seed}/local prefill").random() < _LOCAL_PREFILL_SHARE:
            config = replace_struct(config, router=replace_struct(config.router, local_prefill_itl_ms=_LOCAL_PREFILL_ITL_MS))
    is_wanted = _is_wanted(Fault.LAYOUT, chosen)
    has_other_layout = Random(f"{seed}/layout").random() < _OTHER_LAYOUT_SHARE if is_wanted is None else is_wanted
    if has_other_layout:
        workers += _draw_other_layout(Random(f"{seed}/other layout"), workers)
    return _Cluster(seed, chosen, kinds, routers, config, shape, workers, has_other_layout)


def _draw_all_faults(random: Random, cluster: _Cluster, tier: TierPlan | None, moments: list[float]) -> FaultSchedule:
    """Return the faults of generation workers, their transports, tiers and routers. ``moments`` are when requests arrive."""
    seed, chosen, names = cluster.seed, cluster.chosen, [worker.engine_id for worker in cluster.workers]
    faults = draw_faults(random, cluster.kinds, names, cluster.routers, moments)
    # Without digests a wrong byte of a block is not noticed; a wrong byte in a seal always is.
    connector = cluster.config.connector
    faults.reads.corrupts_data = all(verifies_digests(connector.kv_verify, name) for name in connector.transports)
    if cluster.has_other_layout:
        faults.add(frozenset({Fault.LAYOUT}), [])
    if tier is not None:
        faults.add(tier.kinds, tier.draw_events(moments))
    gray_kinds = draw_gray_kinds(Random(f"{seed}/gray")) if chosen is None else chosen & frozenset(GRAY_FAULTS)
    if gray_kinds and cluster.kinds:
        draw_gray_faults(Random(f"{seed}/gray faults"), faults, gray_kinds, names, cluster.routers)
    return faults


def _is_wanted(kind: Fault, chosen: Collection[Fault] | None) -> bool | None:
    """Return None for a kind that the seed decides."""
    return None if chosen is None else kind in frozenset(chosen)


def _kinds_drawn_apart(requests: tuple[RequestPlan, ...], step_loads: StepLoadPlan | None) -> frozenset[Fault]:
    has_slow_clients = any(request.reading is not None for request in requests)
    drawn = {Fault.SLOW_CLIENT: has_slow_clients, Fault.STEP_LOAD: step_loads is not None}
    return frozenset(kind for kind, is_drawn in drawn.items() if is_drawn)


def _draw_config(random: Random, kinds: frozenset[Fault], routers: tuple[str, ...]) -> KVFerryConfig:
    lease_s, deadline_s = 8.0, 3.0
    if Fault.SHORT_LEASE in kinds:
        lease_s = random.uniform(0.3, 2.0)
        deadline_s = random.uniform(0.2, 1.5) if random.random() < 0.3 else random.uniform(1.0, 8.0)
    return KVFerryConfig(
        cache=CacheSection(
            block_size=random.choice((16, 16, 32)),
            enable_prefix_caching=random.random() < 0.9,
            watermark=random.choice((0.0, 0.0, 0.1)),
        ),
        scheduler=SchedulerSection(
            max_num_batched_tokens=random.choice((16, 48, 128)),
            max_num_seqs=random.choice((2, 4, 8)),
            policy=random.choice(("fcfs", "fcfs", "priority")),
            long_prefill_token_threshold=random.choice((0, 0, 16)),
        ),
        worker=WorkerSection(router_addresses=tuple(map(router_address, routers)), drain_timeout_s=6.0),
        connector=ConnectorSection(
            transports=(random.choice(TRANSPORTS),),
            kv_verify=random.choice(("auto", "auto", "identity", "digest")),
            transfer_deadline_s=deadline_s,
            handshake_timeout_s=1.0,
            lease_s=lease_s,
            lease_renew_interval_s=lease_s / 4,
            lease_max_s=4 * lease_s,
        ),
        router=RouterSection(
            heartbeat_interval_s=0.5,
            heartbeat_timeout_s=3.0,
            send_timeout_s=SEND_TIMEOUT_S,
            request_timeout_s=random.uniform(0.5, 4.0) if Fault.DEADLINE in kinds else 300.0,
        ),
    )


def draw_shape(random: Random, config: KVFerryConfig) -> _Shape:
    """Return what the KV of a run looks like."""
    attentions = FULL if random.random() < _PLAIN_SHARE else random.choice(HYBRIDS)
    block_sizes = (config.cache.block_size,) if random.random() < _PLAIN_SHARE else (16, 32, 64)
    return _Shape(attentions, block_sizes, random)


def _draw_workers(random: Random, kinds: frozenset[Fault], config: KVFerryConfig, shape: _Shape) -> tuple[WorkerPlan, ...]:
    def draw(role: Role, index: int) -> WorkerPlan:
        block_size = shape.draw_block_size()
        num_needed = shape.num_needed(block_size, config.scheduler)
        spare = random.randint(1, 4) if Fault.PRESSURE in kinds else 60
        steps_s = (0.2, 0.6) if Fault.SLOW in kinds and random.random() < 0.7 else (0.005, 0.02, 0.08)
        return WorkerPlan(
            engine_id=f"{role}-{index}",
            role=role,
            num_blocks=num_needed + spare,
            block_size=block_size,
            clock_origin=random.uniform(0.0, 1e5),
            clock_rate=random.uniform(0.75, 1.3) if Fault.DRIFT in kinds else 1.0,
            step_s=random.choice(steps_s),
        )

    num_prefill, num_decode = random.choice(((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2)))
    num_aggregated = random.choice((0, 0, 0, 0, 0, 1))
    return (
        *[draw("prefill", index) for index in range(num_prefill)],
        *[draw("decode", index) for index in range(num_decode)],
        *[draw("aggregated", index) for index in range(num_aggregated)],
    )


def _draw_places(
    random: Random, config: KVFerryConfig, workers: tuple[WorkerPlan, ...]
) -> tuple[KVFerryConfig, tuple[WorkerPlan, ...]]:
    """Return the cluster with more than one transport, or on two hosts, which share no memory."""
    if random.random() < _MANY_TRANSPORTS_SHARE:
        transports = tuple(random.sample(TRANSPORTS, random.randint(2, len(TRANSPORTS))))
        config = replace_struct(config, connector=replace_struct(config.connector, transports=transports))
    if set(config.connector.transports) != {"shm"} and random.random() < _TWO_HOSTS_SHARE:
        workers = tuple(replace(worker, host=random.choice(_HOSTS)) for worker in workers)
    return config, workers


def _draw_other_layout(random: Random, workers: tuple[WorkerPlan, ...]) -> tuple[WorkerPlan, ...]:
    """Return a prefill worker of another layout, mostly with a decode worker that can read it."""

    def draw(role: Role) -> WorkerPlan:
        alike = [worker for worker in workers if worker.role == role]
        clock_origin = random.uniform(0.0, 1e5)
        return replace(random.choice(alike), engine_id=f"{role}-{len(alike)}", clock_origin=clock_origin, kv_dtype=_OTHER_DTYPE)

    has_reader = random.random() < _READER_OF_OTHER_LAYOUT_SHARE
    return (draw("prefill"), draw("decode")) if has_reader else (draw("prefill"),)


def _let_tier_be_used(
    random: Random,
    shape: _Shape,
    config: KVFerryConfig,
    workers: tuple[WorkerPlan, ...],
    requests: tuple[RequestPlan, ...],
) -> tuple[tuple[WorkerPlan, ...], tuple[RequestPlan, ...]]:
    """Return pools that soon reuse their blocks, and prompts that come again when they may have done so."""

    def squeeze(worker: WorkerPlan) -> WorkerPlan:
        num_needed = shape.num_needed(worker.block_size, config.scheduler)
        num_blocks = min(worker.num_blocks, num_needed + random.randint(4, 12))
        return worker if worker.role == "decode" else replace(worker, num_blocks=num_blocks)

    again = [
        replace(request, name=f"{request.name}+", at=request.at + random.uniform(0.5, 5.0), abort_at=None)
        for request in random.sample(requests, max(2, len(requests) // 2))
    ]
    return tuple(map(squeeze, workers)), (*requests, *again)


def _draw_encoders(images: ImagePlan, kinds: frozenset[Fault]) -> tuple[WorkerPlan, ...]:
    random = Random(f"{images.seed}/encoders")
    return tuple(
        WorkerPlan(
            engine_id=f"encode-{index}",
            role="encode",
            num_blocks=images.num_encoder_chunks,
            block_size=64,
            clock_origin=random.uniform(0.0, 1e5),
            clock_rate=random.uniform(0.75, 1.3) if Fault.DRIFT in kinds else 1.0,
            step_s=images.encode_s,
        )
        for index in range(images.num_encoders)
    )


def _show_images(images: ImagePlan, request: RequestPlan, attentions: tuple[HashAttention, ...]) -> RequestPlan:
    """Return the request with images in its prompt. What comes again shows the same ones."""
    shown = images.show(request.name.rstrip("+"), request.prompt_token_ids)
    if not shown.features:
        return request
    inputs = input_ids_of(shown.prompt_token_ids, shown.features, shown.media)
    output = expected_tokens(inputs, request.max_tokens, attentions=attentions)
    stop_token_ids = request.stop_token_ids
    if stop_token_ids:
        stop_token_ids = (output[len(request.expected) - 1],)
        output = output[: output.index(stop_token_ids[0]) + 1]
    return replace(
        request,
        prompt_token_ids=shown.prompt_token_ids,
        mm_features=shown.features,
        media=shown.media,
        stop_token_ids=stop_token_ids,
        text_ends_after=min(request.text_ends_after, len(output)) if request.text_ends_after is not None else None,
        expected=tuple(output),
    )


def _draw_requests(
    random: Random, kinds: frozenset[Fault], routers: tuple[str, ...], attentions: tuple[HashAttention, ...]
) -> tuple[RequestPlan, ...]:
    documents = [[random.randrange(50_000) for _ in range(_MAX_PROMPT_TOKENS)] for _ in range(3)]
    drawn = [_draw_request(random, kinds, documents, attentions, index) for index in range(random.randint(4, 20))]
    return tuple(replace(request, router=random.choice(routers)) for request in drawn)


def _draw_request(
    random: Random, kinds: frozenset[Fault], documents: list[list[int]], attentions: tuple[HashAttention, ...], index: int
) -> RequestPlan:
    """Prompts begin alike, so that they meet in the prefix cache, and often end differently."""
    num_shared = random.choice((0, 16, 32, 64, random.randint(0, 80)))
    num_own = random.randint(0 if num_shared else 1, _MAX_PROMPT_TOKENS - num_shared) if random.random() < 0.7 else 0
    own = [random.randrange(50_000) for _ in range(num_own)]
    prompt = (random.choice(documents)[: num_shared or 1] + own)[:_MAX_PROMPT_TOKENS]
    max_tokens = random.choice((1, 2, random.randint(3, 14), random.randint(3, 14), random.randint(15, _MAX_OUTPUT_TOKENS)))
    output = expected_tokens(prompt, max_tokens, attentions=attentions)
    stop_at = random.randrange(max_tokens) if random.random() < 0.15 else None
    if stop_at is not None:
        output = output[: output.index(output[stop_at]) + 1]
    at = random.uniform(FIRST_REQUEST_S, REQUESTS_WITHIN_S) if random.random() < 0.6 else random.choice(_BURSTS_S)
    leaves = Fault.ABORT in kinds and random.random() < 0.4
    return RequestPlan(
        name=f"r{index:02d}",
        at=at,
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        n=random.choice((1, 1, 1, 2, 3)),
        stop_token_ids=(output[-1],) if stop_at is not None else (),
        priority=random.randint(0, 2),
        cache_salt=random.choice(("", "", "", "tenant")),
        policy=random.choice((None, None, None, "recompute", "fail")),
        abort_at=at + random.choice((0.0, random.uniform(0.0, 0.2), random.uniform(0.0, 2.0))) if leaves else None,
        text_ends_after=random.randint(1, len(output)) if random.random() < 0.1 else None,
        expected=tuple(output),
    )
