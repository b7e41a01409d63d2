"""Reads through NIXL (UCX): RDMA where there is a NIC, cross-memory attach on one host, TCP elsewhere.

The only file that imports the library. Findings about NIXL 1.5.1 that decide the design:

- Releasing a handle does not cancel its read: its bytes land later. So a handle in progress is never released, and a read has
  no early end. The consumer makes **one agent per peer and incarnation**; destroying that agent is the fence, and touches no
  other peer. The producer has one agent for all consumers, since reading takes none of its time.
- Errors are raised, in posting and in polling, and the library documents a state ``ERR`` as well. None of them says that the
  read writes nothing more, so the first failure of a peer's read fences the peer, before any of its reads is reported.
- After a disconnect an agent's connection is dead for good; the caller removes the peer and shakes hands again.
- An agent's progress thread spins unless it is configured to sleep between events, see ``sleeping_progress``.
- On one host a read runs inside the posting call, so reads must be small (the caller cuts loads into some MiB) and this runs
on the transfer thread. Over TCP it is asynchronous and nothing announces its end: ``poll`` with a back-off.
- Over TCP, UCX may end the process of a producer that was stopped (SIGSTOP) while a consumer with open reads went away: once
it continues it aborts with "unexpected error: Endpoint timeout". Killing consumers of a running producer never did that.
- UCX listens with TCP on every interface unless it is told which to use, has no authentication, and may end the process
  (SIGSEGV) on bytes that it does not understand. So the agents of a worker at a loopback address use the device ``lo`` alone.
- The library's Python logger writes INFO lines to stdout unless ``NIXL_LOG_LEVEL`` says otherwise.
- The producer's memory must stay mapped while any consumer may hold its metadata: the engine never unmaps its pool.

- A pool on a GPU is registered as VRAM: UCX goes by CUDA IPC on one host and by RDMA between hosts. Where the GPU has no active
  NVLink, UCX 1.20 reads by CUDA IPC only if it is told to (``UCX_CUDA_IPC_ENABLE_GET_ZCOPY``); else it emulates reads over TCP,
  many times slower. Seals are in host memory everywhere, so their read is a transfer between hosts' memories, posted once the
  blocks' bytes are there.

Source: NIXL agent API, ``nixl_cu12._api`` of nixl-cu12 1.5.1; the packages for CUDA 12 and 13 differ in what they link against.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from connectors.p2p.transport.base import (
    DEVICE_BACKOFF_S,
    Backoff,
    RowShape,
    SystemNumber,
    check_read,
    decode_metadata,
    landing_of,
    region_at,
)
from connectors.p2p.transport.interface import POOL_REGION, PeerId, ReadResult, RowRegion, Transport
from core.environment import set_default_environment, ucx_net_devices
from core.errors import ConfigError, ConnectorUnavailable, PeerUnreachable, ProtocolError
from core.ids import IdSource, new_hex_id
from core.log import event
from core.struct_types import prepared
from core.wire.sockets import is_loopback, split_tcp

BACKEND = "UCX"
MODULES = ("nixl_cu13", "nixl_cu12")  # by the CUDA release; on a host without a GPU either will do
INSTALL_HINT = "pip install nixl-cu12==1.5.1 (beside a torch for CUDA 13: nixl-cu13==1.5.1)"
BACKOFF_S = (0.0002, 0.001)  # between looks at reads in progress: the first and the longest interval
PROGRESS_INTERVAL_US = 10_000  # events wake the progress threads; this is how often they look without one

LOOPBACK = "lo"
ONLY_LOOPBACK = {"engine_config": f"NET_DEVICES={LOOPBACK}"}  # of no effect if UCX_NET_DEVICES is set

MemoryType = Literal["DRAM", "VRAM"]

# The library has no type annotations.
Agent = Any
XferHandle = Any
DescriptorList = Any


_log = logging.getLogger(__name__)


class RemoteRegion(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a producer's region, from which the consumer builds the descriptors itself."""

    base_address: Annotated[int, msgspec.Meta(ge=0)]
    shape: RowShape
    memory_type: MemoryType
    device_id: SystemNumber


@prepared
class NixlMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a producer tells its consumers. ``agent`` is the library's own blob."""

    agent: bytes
    regions: tuple[RemoteRegion, ...]


@dataclass(slots=True)
class _Peer:
    """Our agent for one peer, with its descriptor lists: one pair per region, one descriptor per row."""

    agent: Agent
    shapes: list[RowShape]
    landing: tuple[RowRegion, ...]  # regions in which its rows land
    local: list[DescriptorList]
    remote: list[DescriptorList]


@dataclass(slots=True)
class _Read:
    """A read in progress. The library's handle of it keeps the agent alive, so only this object may hold it."""

    peer_id: PeerId
    xfer: XferHandle = None


class NixlTransport(Transport):
    """Reads rows with one NIXL agent per peer.

    ``name_prefix`` starts the names of agents, which are never reused; ``backend_params`` goes to the UCX backend
    (strings). If the host of ``bind_address`` is loopback, agents listen there only, except those for peers at other addresses;
    ``$UCX_NET_DEVICES`` goes before that.
    """

    name = "nixl"

    def __init__(
        self,
        ids: IdSource,
        name_prefix: str,
        bind_address: str = "tcp://127.0.0.1:0",
        backend_params: Mapping[str, str] | None = None,
    ) -> None:
        self._ids = ids
        self._name_prefix = name_prefix
        self._is_local = _is_local(bind_address)
        self._has_warned = False
        self._backend_params = {"ucx_error_handling_mode": "peer", **(backend_params or {})}
        self._api: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._refusals: tuple[type[Exception], ...] = ()  # the library's exceptions for metadata that it does not accept
        self._regions: tuple[RowRegion, ...] = ()
        self._staging: RowRegion | None = None
        self._spare: Agent = None  # made by ``register``, used for the first purpose that needs an agent
        self._serving: Agent = None
        self._peers: dict[PeerId, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._ended: list[ReadResult] = []
        self._last_handle = 0
        self._backoff = Backoff(*BACKOFF_S)

    def unavailable_reason(self) -> str | None:
        """Look for the library without loading it."""
        return None if installed_module() else f"NIXL is not installed: {INSTALL_HINT}"

    def register(self, regions: Sequence[RowRegion], staging: RowRegion | None = None) -> None:
        """Load the library and check that it accepts the regions' memory, on an agent for the producer or the first peer."""
        if any(region.device != "cpu" for region in regions):
            set_default_environment("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")  # elsewhere UCX warns that nothing reads it
        self._load_library()
        self._regions, self._staging = tuple(regions), staging
        self._backoff = Backoff(*(BACKOFF_S if all(region.device == "cpu" for region in regions) else DEVICE_BACKOFF_S))
        try:
            self._spare = self._new_agent(self._is_local)
        except self._errors as error:
            raise ConnectorUnavailable(f"nixl transport: {type(error).__name__}: {error}") from None

    def describe(self) -> bytes:
        """Return the producer agent's metadata; its progress thread serves from now on."""
        if self._serving is None:
            self._serving = self._take_agent(self._is_local)
        regions = tuple(
            RemoteRegion(
                base_address=region.base_address,
                shape=RowShape(region.num_rows, region.row_bytes),
                memory_type=memory_type(region),
                device_id=device_id(region),
            )
            for region in self._regions
        )
        return msgspec.msgpack.encode(NixlMetadata(agent=self._serving.get_agent_metadata(), regions=regions))

    def add_peer(self, peer: PeerId, metadata: bytes) -> None:
        """Make an agent for this peer. Takes about half a second, except for the first one."""
        producer = decode_metadata(metadata, NixlMetadata, self.name)
        landing = landing_of(self._regions, self._staging, [region.shape for region in producer.regions])
        if peer in self._peers:
            return
        try:
            self._peers[peer] = self._connect(self._is_local and _is_local(peer.address), producer, landing)
        except self._errors as error:
            gc.collect()
            kind = ProtocolError if isinstance(error, self._refusals) else PeerUnreachable
            raise kind(f"nixl cannot reach {peer.address}: {type(error).__name__}: {error}") from None

    def pool_shape(self, peer: PeerId) -> tuple[int, int] | None:
        """Return the shape in its metadata."""
        shape = self._peers[peer].shapes[POOL_REGION]
        return shape.num_rows, shape.row_bytes

    def post_read(self, peer: PeerId, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> int:
        """Post one transfer with a descriptor per row. On one host it is over when this returns."""
        producer = self._peers.get(peer)
        if producer is None:
            raise PeerUnreachable(f"no NIXL agent for {peer.address}")
        local = region_at(producer.landing, region)
        check_read(producer.shapes[region], local, remote_rows, local_rows)
        self._last_handle += 1
        self._backoff.restart()
        self._reads[self._last_handle] = _Read(peer)
        self._fence_after(peer, self._start(self._last_handle, region, remote_rows, local_rows))
        return self._last_handle

    def poll(self) -> list[ReadResult]:
        """Ask for the state of every read in progress."""
        for handle, peer in [(handle, read.peer_id) for handle, read in self._reads.items()]:
            if handle in self._reads:  # else it has ended with its peer
                self._fence_after(peer, self._look(handle))
        ended, self._ended = self._ended, []
        self._backoff.after_look(has_ended=bool(ended))
        return ended

    def cancel(self, handle: int) -> None:
        """Ignored: a read in progress has no early end. It ends by itself, or when its peer is fenced."""

    def remove_peer(self, peer: PeerId) -> None:
        """Destroy the peer's agent, and with it every transfer that could still write."""
        self._fence(peer, f"{peer.address} was removed")

    def max_wait_s(self) -> float | None:
        """Back off while reads are in progress; nothing else needs polling."""
        if self._ended:
            return 0.0
        return self._backoff.wait_s if self._reads else None

    def close(self) -> None:
        """Destroy all agents."""
        for peer in list(self._peers):
            self.remove_peer(peer)
        self._serving = self._spare = None
        self._regions, self._staging = (), None
        gc.collect()

    def _load_library(self) -> None:
        set_default_environment("NIXL_LOG_LEVEL", "WARN")
        try:
            self._api, bindings = import_library()
        except ImportError as error:
            raise ConnectorUnavailable(f"NIXL cannot be loaded ({error}): {INSTALL_HINT}") from None
        names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
        self._errors = tuple(getattr(bindings, name) for name in names)
        self._refusals = (bindings.nixlMismatchError, bindings.nixlInvalidParamError, bindings.nixlNotAllowedError)

    def _take_agent(self, is_local: bool) -> Agent:
        """Return an unused agent; one ``is_local`` cannot be reached from other machines."""
        agent, self._spare = self._spare, None
        if agent is not None and is_local == self._is_local:
            return agent
        del agent
        gc.collect()  # an agent is in a cycle, and would go on listening
        return self._new_agent(is_local)

    def _new_agent(self, is_local: bool) -> Agent:
        """Return an agent with all our regions registered. Its progress thread serves asynchronous transfers."""
        if ucx_net_devices() not in (("", LOOPBACK) if is_local else (LOOPBACK,)):
            self._warn_exposed()
        config = self._api.nixl_agent_config(enable_prog_thread=True, backends=[])
        with sleeping_progress(self._api.nixlBind):
            agent = self._api.nixl_agent(new_hex_id(self._ids, f"{self._name_prefix}-"), config)
        agent.create_backend(BACKEND, self._backend_params | (ONLY_LOOPBACK if is_local else {}))
        staging = [] if self._staging is None else [self._staging]
        for region in [*self._regions, *staging]:
            entry = (region.base_address, region.num_bytes, device_id(region), "")
            agent.register_memory([entry], memory_type(region), backends=[BACKEND])
        return agent

    def _warn_exposed(self) -> None:
        """Say once that UCX can be reached from other machines; a cluster key does not change that."""
        if not self._has_warned:
            self._has_warned = True
            reason = "UCX (transport nixl) has no authentication, with a cluster key or without: keep it on a closed network"
            address = ucx_net_devices() or "every interface"
            _log.warning(event("exposed_socket", setting="connector.transports", address=address, reason=reason))

    def _connect(self, is_local: bool, producer: NixlMetadata, landing: tuple[RowRegion, ...]) -> _Peer:
        agent = self._take_agent(is_local)
        remote_name = agent.add_remote_agent(producer.agent)
        if isinstance(remote_name, bytes):
            remote_name = remote_name.decode()
        peer = _Peer(agent, [region.shape for region in producer.regions], landing, [], [])
        for local, remote in zip(landing, producer.regions, strict=True):
            local_rows = _descriptors(local.base_address, RowShape(local.num_rows, local.row_bytes), device_id(local))
            peer.local.append(agent.prep_xfer_dlist("", local_rows, mem_type=memory_type(local)))
            remote_rows = _descriptors(remote.base_address, remote.shape, remote.device_id)
            peer.remote.append(agent.prep_xfer_dlist(remote_name, remote_rows, mem_type=remote.memory_type))
        return peer

    def _start(self, handle: int, region: int, remote_rows: Sequence[int], local_rows: Sequence[int]) -> str:
        """Post a transfer; return why it failed, empty if it did not."""
        read = self._reads[handle]
        producer = self._peers[read.peer_id]
        try:
            read.xfer = producer.agent.make_prepped_xfer(
                "READ", producer.local[region], _indices(local_rows), producer.remote[region], _indices(remote_rows)
            )
            return self._settle(handle, producer.agent.transfer(read.xfer))
        except self._errors as error:
            return f"{type(error).__name__}: {error}"

    def _look(self, handle: int) -> str:
        """Take the state of a transfer; return why it failed, empty if it did not."""
        read = self._reads[handle]
        try:
            return self._settle(handle, self._peers[read.peer_id].agent.check_xfer_state(read.xfer))
        except self._errors as error:
            return f"{type(error).__name__}: {error}"

    def _settle(self, handle: int, state: str) -> str:
        """Release a transfer that is done; return why it failed, empty if it did not."""
        if state == "PROC":
            return ""
        if state != "DONE":
            return f"it ended in state {state}"
        self._reads[handle].xfer.release()
        del self._reads[handle]
        self._ended.append(ReadResult(handle))
        return ""

    def _fence_after(self, peer: PeerId, failure: str) -> None:
        """Fence a peer if a read of it failed. Callers must not hold the agent, a transfer or an error's traceback."""
        if failure:
            self._fence(peer, f"a NIXL read from {peer.address} failed: {failure}")

    def _fence(self, peer: PeerId, reason: str) -> None:
        """Destroy a peer's agent; only then are its open reads terminal."""
        producer = self._peers.pop(peer, None)
        if producer is None:
            return
        handles = [handle for handle, read in self._reads.items() if read.peer_id == peer]
        for handle in handles:
            del self._reads[handle]
        producer.local.clear()
        producer.remote.clear()
        producer.agent = None
        gc.collect()  # the agent must be gone when this returns, also if a traceback holds a cycle around it
        try:
            for region in self._regions:
                if region.synchronize is not None:
                    region.synchronize()  # copies on a device that the agent has begun do not end with it
        finally:  # a device that cannot be synchronised is lost, and the worker with it
            self._ended += [ReadResult(handle, PeerUnreachable(reason)) for handle in handles]


def _is_local(address: str) -> bool:
    """Return True if this address is reachable from this machine only; False for unknown addresses."""
    try:
        return is_loopback(split_tcp(address)[0])
    except ConfigError:
        return False


def installed_module() -> str | None:
    """Return the name of the library's module, None if it is not installed. Loads nothing."""
    return next((name for name in MODULES if importlib.util.find_spec(name) is not None), None)


def import_library() -> tuple[Any, Any]:
    """Import the library; return its Python classes and its native module.

    Raises:
        ImportError: it is not installed, or lacks a library that it is linked against.
    """
    module = installed_module() or MODULES[-1]
    return importlib.import_module(f"{module}._api"), importlib.import_module(f"{module}._bindings")


@contextlib.contextmanager
def sleeping_progress(bindings: Any) -> Iterator[None]:  # noqa: ANN401 - the library has no types
    """Have the agents made in this block sleep in their progress threads until something happens.

    The library's Python class sets the interval to 0 and accepts no other: each agent's thread then spins on a core, which it
    takes from the engine and from the transfers themselves. So this block intercepts its call of the native constructor.
    """
    make_agent = bindings.nixlAgent

    def make(name: str, config: Any) -> Agent:  # noqa: ANN401
        config.pthrDelay = PROGRESS_INTERVAL_US
        return make_agent(name, config)

    bindings.nixlAgent = make
    try:
        yield
    finally:
        bindings.nixlAgent = make_agent


def memory_type(region: RowRegion) -> MemoryType:
    """Return NIXL's name of the kind of memory."""
    return "DRAM" if region.device == "cpu" else "VRAM"


def device_id(region: RowRegion) -> int:
    """Return the index in ``cuda:1``; 0 for host memory."""
    return int(region.device.partition(":")[2] or 0)


def _descriptors(base_address: int, shape: RowShape, device: int) -> npt.NDArray[np.uint64]:
    """Return [num_rows, 3] of address, length and device."""
    rows = np.empty((shape.num_rows, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(base_address) + np.arange(shape.num_rows, dtype=np.uint64) * np.uint64(shape.row_bytes)
    rows[:, 1] = shape.row_bytes
    rows[:, 2] = device
    return rows


def _indices(rows: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.asarray(rows, dtype=np.int32)
