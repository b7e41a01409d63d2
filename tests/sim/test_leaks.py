"""After the last request nothing of any is left, also where no gauge looks: tables, queues, in-flight counts.

Every container that is reachable from a worker or a router must be empty, except those of ``KEPT``: a new one is looked at by
default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.encoder import SimEncoder
from kvferry.sim.faults import Fault
from kvferry.sim.router import SimRouter
from kvferry.sim.worker import SimWorker
from router.dispatch.members import GenerationWorker

pytestmark = pytest.mark.slow

OURS = frozenset({"core", "connectors", "router", "prefill", "decode", "encode"})
KEPT = {  # by why they may hold something
    "wired at the start": (
        *("HandoffProducer.handlers", "PrefixAsks.handlers", "PrefixServer.handlers", "PullProtocol.handlers"),
        *("HandshakeResponder.offers", "Probes._transports", "PullSettings.max_read_bytes_by", "TransferExecutor._transports"),
        *("MachineDriver._actions", "MachineDriver._events"),
        *("Limits.least", "RowsDigester._digesters", "ContentFeed._parts", "HashImageEncoder._images"),
    ),
    "counts of what has happened": (
        *("SchedulerState.num_load_fallbacks", "EngineStats.num_load_fallbacks", "HashEncoder.num_encoded"),
        *("FetchingScheduler.counts", "TierTransfer.counts", "EmbeddingTransfer.counts"),
    ),
    "caches, with a bound": (
        *("BlockPool.blocks", "_PrefixMap._blocks", "EncoderCacheManager._freeable", "EncoderCacheManager._num_embeds"),
        *("EncoderCacheManager._users", "HashEncoder.cache", "ChunkCache._items", "ProducedEmbeddings._held"),
        *("StoreOffers._stored", "EncodeLegs._known", "_Prompt.chains", "_Prompt.keys"),
    ),
    "requests and handoffs that ended last, with a bound, for messages that come late": (
        *("PrefillHandler._transfer_ids", "LeaseTable._ended", "EndedNames._aborted_at", "EncodeHandler._answered"),
    ),
    "forgotten when the next step or the next request looks": (
        *("EarlyPulls.leaving", "EncoderInputs._counted_on", "FairRequestQueue._by_order", "FairRequestQueue._by_tag"),
        *("SavePlanner._seen_generation", "TierConnectorScheduler._open_lookups", "EncodeEngine._queue"),
    ),
    "of tenants, with a bound": ("FairRequestQueue._tags",),
    "of a worker's routers": (
        *("WorkerState._links", "ContentFeed._routers", "ContentReports._due_at", "Heartbeats._pauses"),
        *("RoleSwitch._known", "RoleSwitch._heartbeats", "RateLimit._windows"),
    ),
    "of a worker's peers": (
        *("Peers._peers", "Peers._failed", "Handshakes._answering", "Handshakes._asked", "StallWatch._uncounted"),
        *("TransportHealth._breakers", "TransferExecutor._bytes_seen", "TransferExecutor._peers", "TransferExecutor._pools"),
    ),
    "of a router's workers, pools and pairs": (
        *("GenerationWorker.peers", "Membership._by_peer", "Membership._members", "Membership._met_prefills"),
        *("Namesakes._former", "Handoffs._introduced", "PairHealth._penalties", "ReportedContents._indexes"),
        *("ReportedContents._workers", "Restarts._is_supervised", "Restarts._starts", "RouterPreferences._disliked"),
        *("RouterPreferences._places", "RouterPreferences._roles", "RouterPreferences._views", "RouteCosts._fits"),
        *("RouteCosts._load_prices", "RouteCosts._num_trials", "RouteCosts._offered", "RouteCosts._workers"),
        *("Sources.times", "Sources.transports", "WaitEstimates._queues", "Namesakes._holders", "Restarts._left"),
        *("Restarts._missing_since",),
    ),
}
KEPT_NAMES = frozenset(name for names in KEPT.values() for name in names)


def roots_of_worker(worker: SimWorker | SimEncoder) -> Iterator[object]:
    yield from (worker.state, worker.engine.core)
    if isinstance(worker, SimWorker):
        yield from (worker.handler, worker.model, worker.model.encoder, worker.engine.core.scheduler.state.kv_cache_manager)
    for part in (getattr(worker, name, None) for name in ("connector", "tier", "embeddings")):
        yield from (value for value in getattr(part, "__dict__", {}).values() if is_ours(value))


def roots_of_router(router: SimRouter) -> Iterator[object]:
    core = router.core
    yield from (core, *core.membership.workers, *core.route_costs._workers.values())
    yield from core.wait_estimates._queues.values()


def is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in OURS


def attributes_of(owner: object) -> Iterator[tuple[str, object]]:
    slots = [name for kind in type(owner).__mro__ for name in vars(kind).get("__slots__", ())]
    for name in (*getattr(owner, "__dict__", ()), *slots):
        if hasattr(owner, name):
            yield name, getattr(owner, name)


def containers_of(roots: list[object]) -> Iterator[tuple[str, object]]:
    """Return every container of every object of ours that is reachable by attributes, as ``Class.attribute``."""
    seen: dict[int, object] = {}
    found = list(roots)
    while found:
        owner = found.pop()
        if id(owner) in seen:
            continue
        seen[id(owner)] = owner
        for name, value in attributes_of(owner):
            if isinstance(value, dict | set | list | deque):
                yield f"{type(owner).__name__}.{name}", value
            elif is_ours(value):
                found.append(value)


def counts_of(worker: SimWorker | SimEncoder | GenerationWorker) -> tuple[str, int]:
    if isinstance(worker, GenerationWorker):
        return f"num_inflight of {worker.key.engine_id}", worker.num_inflight
    return f"num_choices of {worker.spec.engine_id}", worker.state.serving.requests.num_choices


@pytest.mark.parametrize(
    ("kinds", "peer_prefixes"),
    [
        (None, None),
        ((Fault.ABORT,), None),
        ((Fault.STALL, Fault.READ_ERROR), None),
        ((Fault.CUT, Fault.CRASH), None),
        ((Fault.ABORT, Fault.PRESSURE), True),
    ],
    ids=str,
)
def test_nothing_is_left(kinds, peer_prefixes, first_seeds):
    for seed in first_seeds(8, 15):
        cluster = SimCluster(draw_plan(seed, kinds, peer_prefixes=peer_prefixes))
        cluster.run()
        alive = [worker for worker in cluster.workers.values() if worker.host.process.is_alive and not worker.is_stopped]
        roots = [root for worker in alive for root in roots_of_worker(worker)]
        roots += [root for router in cluster.routers.values() for root in roots_of_router(router)]
        members = [member for router in cluster.routers.values() for member in router.core.membership.workers]
        found = [*containers_of(roots), *map(counts_of, [*alive, *members])]
        left = {name: content for name, content in found if content and name not in KEPT_NAMES}
        assert not left, f"seed {seed}"


def test_every_exception_is_a_container_that_there_is(first_seeds):
    seen = set()
    for seed in first_seeds(8, 15):
        cluster = SimCluster(draw_plan(seed))
        roots = [root for worker in cluster.workers.values() for root in roots_of_worker(worker)]
        roots += [root for router in cluster.routers.values() for root in roots_of_router(router)]
        seen |= {name for name, _ in containers_of(roots)}
    classes = {name.partition(".")[0] for name in seen}
    assert {name for name in KEPT_NAMES if name.partition(".")[0] in classes} <= seen
