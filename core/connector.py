"""The interface of a KV connector: ``Connector``, the ``ConnectorContext`` it is made from, and its two sides.

The scheduler side decides *what* is loaded and kept; it runs on the engine thread, inside ``Scheduler``. The worker side moves
bytes; its methods are called by the runner, also on the engine thread, and must not block: long work belongs to the transfer
thread. The sides share nothing but ``KVConnectorMetadata`` (one object per step, scheduler → worker) and ``KVConnectorOutput``
(worker → scheduler). Contracts follow vLLM's ``KVConnectorBase_V1``; here each side is a class of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from core.clock import Clock
from core.config import KVFerryConfig
from core.errors import ConfigError
from core.ids import IdSource
from core.kv.events import KVCacheEvent
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.kv.pool_region import KVPoolRegion
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, SchedulerOutput
from core.tracing import Tracer
from core.wire.contents import ContentPart
from core.wire.curve import ClusterKeys
from core.wire.early import MeetProducer
from core.wire.key_rotation import keys_of
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import Role


class KVConnectorScheduler(ABC):
    """The side inside the scheduler. All calls come from the engine thread.

    With ``reads_early`` it also loads handoffs without a lease, of prompts that are still being computed, and verifies each
    block. Requests for these have ``is_early`` and never run. One that cannot load at once, for lack of an answer or of blocks,
    ends in the same step, and another one follows in a later step.

    With ``makes_handoffs`` it may return a handoff of a finished request. Of several connectors at once one may.
    """

    reads_early = False
    makes_handoffs = False

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Store the manager. Called once, before any request."""

    def on_new_request(self, request: Request) -> None:
        """Process a new request, once."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond ``num_computed_tokens`` can be loaded now, and whether the load is asynchronous.

        May be called many times for one request and must be idempotent. None = ask again in a later step; because an engine
        without other work sleeps, the worker side's wakeup must follow when the answer changes. The flag must be False when
        the count is 0.

        Not called for a request that loads nothing: ``request.skip_reading_prefix_cache``, or, from its failed load on,
        ``request.has_failed_load``. ``update_state_after_alloc`` follows all the same, with 0.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """All ``blocks`` of the request are allocated; load ``num_external_tokens`` of its tokens into them.

        Called after every successful allocation of a waiting request, also with 0, and a second time (with 0) when an
        asynchronous load has ended and the request starts to run.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return this step's message to the worker side and reset per-step state. Called for empty steps too."""

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process the worker side's report, before the scheduler applies it."""

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """Decide, once per request and before its blocks are freed, whether their free is delayed.

        Returns (True, handoff or None) to keep the blocks until the request id is reported in ``finished_sending``.
        ``block_ids`` covers the computed tokens only, one list per group; all empty for a request that never ran.
        """
        return False, None

    def describe_prefix(self, request: Request, start: int, end: int) -> KVHandoff | None:
        """Describe the blocks with the tokens [start, end) of a prompt that is being computed; None if that is not supported.

        Both ends are block boundaries, and the blocks are sealed. Nothing keeps them: a reader accepts what it has read by the
        seals only.
        """
        return None

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return and forget the connector's own KV events."""
        return ()

    def has_pending_push_work(self) -> bool:
        """True if the engine must keep stepping for the connector's sake."""
        return False

    def has_pending_block_frees(self) -> bool:
        """True if blocks will soon be freed, so that preempting would be premature.

        The engine may sleep meanwhile: the connector wakes it when they are free, as for any other report.
        """
        return False

    def soon_released_blocks(self) -> Collection[int]:
        """Return the ids of blocks of which this connector will soon release a reference, each once.

        ``has_pending_block_frees`` is about those that nobody else holds. Several connectors may hold one block, so ``multi``
        asks for both.
        """
        return ()

    def free_spare_blocks(self) -> None:
        """Free blocks that are kept as a favour only, since a request lacks blocks."""

    def shutdown(self) -> None:
        """Release everything; nothing is called afterwards."""


class KVConnectorWorker(ABC):
    """The side that serves the model runner. All calls come from the engine thread.

    Per step: ``handle_preemptions`` → ``start_load_kv`` → per layer ``wait_for_layer_load`` / ``save_kv_layer`` →
    ``wait_for_save`` → ``get_transfer_results`` → ``get_block_ids_with_load_errors``. Empty steps run the same sequence without
    layers. ``start_load_kv`` comes before the forward pass if the step has synchronous loads, or if the device computes while
    it is launched, as the CPU does; else after the launch.
    """

    @abstractmethod
    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Register the pool. Called once, before any step."""

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set a thread-safe callback that wakes an idle engine when there is a report."""

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        """Finish with blocks of preempted requests before this step may overwrite them."""

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Start the loads that the scheduler side ordered."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once the layer's synchronous loads are done."""

    def save_kv_layer(self, layer: int) -> None:
        """Start saving a layer that the step has just computed."""

    def wait_for_save(self) -> None:
        """Return once this step's blocks may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the ids whose sending and whose receiving ended; see ``get_transfer_results``."""
        return set(), set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Report what ended since the last call; each id once. ``finished_req_ids`` left the scheduler in this step."""
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorOutput(finished_sending=sending, finished_recving=recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return and forget the blocks whose content must not be used."""
        return set()

    def shutdown(self) -> None:
        """Stop threads and release memory registrations; nothing is called afterwards."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """A worker process: its settings, its identity, and its clock, randomness and metrics."""

    config: KVFerryConfig
    role: Role
    engine_id: str  # stable name of the instance
    incarnation: int  # 64 random bits, new at every start of the process
    clock: Clock
    ids: IdSource
    metrics: CollectorRegistry
    tracer: Tracer | None = None  # None = requests are not traced

    @property
    def can_switch_role(self) -> bool:
        """True if the worker may have other roles later."""
        return self.config.worker.can_switch_role and self.role != "encode"

    @property
    def has_readers(self) -> bool:
        """True if other workers may read its KV blocks, now or in a later role."""
        shares_prefixes = self.config.connector.peer_prefixes and self.role != "encode"
        return self.role == "prefill" or self.can_switch_role or shares_prefixes

    @property
    def keys(self) -> ClusterKeys | None:
        """The keys for sockets between workers; None = these sockets are open."""
        return keys_of(self.config.security)


@dataclass(frozen=True, kw_only=True)
class ConnectorContext(WorkerContext):
    """The inputs of a connector: the worker, its loaded model, and the layout of a block of its KV pool."""

    model_fingerprint: bytes
    layout: KVLayoutInfo


ContentFollower = Callable[[str, Iterable[bytes], Iterable[bytes]], None]  # medium, hashes of blocks stored and removed


class Connector:
    """Makes both sides of a connector, and runs in the worker's event loop.

    The engine gets ``scheduler`` and ``worker``, and calls them on its thread only. The methods run in the event loop, which
    also sends the worker's heartbeats: none may wait for a disk, a socket or a lock that is held for long. Such work belongs to
    a thread.
    """

    scheduler: KVConnectorScheduler
    worker: KVConnectorWorker

    @property
    def transports(self) -> tuple[str, ...]:
        """Transports that work here, in order of preference; known after ``start``, empty if the connector has none."""
        return ()

    @property
    def host_id(self) -> str:
        """Equal on two workers that can use transports for one host; empty if the connector has no such transports."""
        return ""

    @property
    def meets_producers(self) -> bool:
        """True if ``meet`` prepares for the handoffs of another worker."""
        return False

    @property
    def control_address(self) -> str:
        """Where readers of handoffs connect to this worker; known after ``start``, empty if they need no address."""
        return ""

    @property
    def prefix_address(self) -> str:
        """Where other workers ask this one for beginnings of prompts; known after ``start``, empty if it serves none."""
        return ""

    @property
    def has_digests(self) -> bool:
        """True if this worker can verify every read byte by byte."""
        return False

    @property
    def content_parts(self) -> tuple[ContentPart, ...]:
        """The tiers below the pool from which this connector loads, as routers learn of them; at most one of each medium."""
        return ()

    def follow_contents(self, publish: ContentFollower) -> None:
        """Call ``publish`` from now on, in any thread, with what enters and leaves these tiers. Before ``start``."""

    async def start(self) -> None:
        """Bind sockets and start tasks. The KV pool is registered by now.

        Raises:
            ConnectorUnavailable: a library or device is missing.
        """

    async def stop(self) -> None:
        """End tasks and threads, close sockets."""

    def meet(self, producer: MeetProducer) -> None:
        """Get to know a worker whose handoff is about to come, so that its first load finds a connection.

        Nothing may depend on it: each router calls it once for each worker, or not at all, and a failure is left for the load
        to report.
        """

    def expect(self, handoff: KVHandoff) -> None:
        """Prepare for a request that may load this handoff: it is on its way to the engine, which may refuse it.

        Questions to the owner need not wait for the engine. If no request comes, nothing of it may remain.
        """

    def release(self, transfer_ids: Sequence[str]) -> None:
        """End these handoffs: they will not be read. Idempotent."""

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Extend the leases of these handoffs."""

    def num_leased_blocks(self) -> int:
        """Return how many blocks are held for readers."""
        return 0

    def num_saving_blocks(self) -> int:
        """Return how many blocks are held until they are copied elsewhere, which takes a moment."""
        return 0

    def saving_block_ids(self) -> Iterable[int] | None:
        """Return these blocks, so that ``multi`` counts one that several connectors hold once; None if they are not known."""
        return None

    def longest_lease_s(self) -> float:
        """Return how long the longest lease of these blocks lasts unless its reader renews it."""
        return 0.0


ConnectorFactory = Callable[[ConnectorContext], Connector]


def check_connector(made: object, setting: str, name: str) -> Connector:
    """Return what a factory of a connector has made. Without a connector the worker would serve all the same, alone.

    Raises:
        ConfigError: it is no connector, or has not both sides; names the setting and the fix.
    """
    kinds: dict[str, type] = {"scheduler": KVConnectorScheduler, "worker": KVConnectorWorker}
    check_made(made, Connector, kinds, setting, name)
    assert isinstance(made, Connector)
    return made


def check_made(made: object, interface: type, sides: Mapping[str, type], setting: str, name: str) -> None:
    """Check that a factory has made an instance of an interface with these sides.

    Raises:
        ConfigError: it has not; names the setting and the fix.
    """
    if isinstance(made, interface):
        missing = [side for side, kind in sides.items() if not isinstance(getattr(made, side, None), kind)]
        if not missing:
            return
        problem = f"{type(made).__name__} has no {' and no '.join(missing)} that derives from the interface"
    else:
        problem = "its factory returned None" if made is None else f"its factory returned {made!r}"
    whole_name = f"{interface.__module__}.{interface.__name__}"
    whose = "both sides, scheduler and worker" if len(sides) > 1 else f"its side {', '.join(sides)}"
    fix = f"the factory must return an instance of {whole_name} with {whose}"
    raise ConfigError(f"{setting} = {name!r}: {problem}; {fix}", param=setting)
