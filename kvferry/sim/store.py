"""Stores of KV blocks under virtual time: one process that workers share, its clients, and a store inside a worker.

Takes the place of ``kvstore.server``, ``kvstore.client`` and ``kvstore.embedded``: carries the real state machines of both
sides, over the simulated network, by each process's own clock. Lower tiers outlive the store's process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import msgspec
import numpy as np

from core.ids import SeededIds, new_incarnation
from core.testing.hash_model import SLOT_BYTES
from kvferry.sim.host import Host
from kvferry.sim.loop import Process, Queue, Timer
from kvferry.sim.network import Link
from kvferry.sim.tier_plan import TierPlan
from kvferry.sim.troubles import Kind
from kvstore.arena import NONCE_BYTES, Arena, SlotState, arena_bytes, round_slot_bytes, slot_word, write_header
from kvstore.client_actions import ClientAction, ClientOptions, CopyIn, MapArena, SendToStore
from kvstore.client_base import StoreClientBase
from kvstore.client_state import ClientState, ConnectionState
from kvstore.eviction import make_policy
from kvstore.memory import MemoryTier
from kvstore.messages import decode_to_client, decode_to_store, encode_to_client, encode_to_store
from kvstore.server_state import Action, SendParcel, ServerOptions, ServerState, StartJob, WatchProcess
from kvstore.testing.in_memory import DictTier, MappableArena
from kvstore.tiers.base import TierJob
from kvstore.tiers.worker import TierRunner

REQUEST_TIMEOUT_S = 1.0
HEARTBEAT_INTERVAL_S = 0.25
CLIENT_TIMEOUT_S = 3.0
_MAX_BLOCK_BYTES = 64 * SLOT_BYTES
_TIMER_S = 0.5  # of the store
_COPY_S = 0.02  # of the blocks of one put, up to
_JOB_S = 0.05  # of a lower tier, up to
_RECONNECT_S = 0.3
_NOTICE_DEATH_S = 0.01
_HEADER = b"\x00\xff"  # no kind of frame of the other protocols
_FOREVER_S = 1e12


def store_address(name: str) -> str:
    """Return where clients connect to a store."""
    return f"tcp://{name}:7100"


class CopyWatch(Protocol):
    """Sees which memory of the pool is read."""

    def on_copy(self, source: memoryview) -> None:
        """A block is being read to be stored."""


def machine_options(plan: TierPlan, ids: SeededIds, max_pinned_share: float) -> ServerOptions:
    """Return the options of a store's machine, with a new incarnation."""
    incarnation = new_incarnation(ids)

    def make_memory(_: int) -> MemoryTier:
        slot_bytes = round_slot_bytes(_MAX_BLOCK_BYTES)
        memory = memoryview(bytearray(arena_bytes(plan.num_slots, slot_bytes)))
        nonce = ids.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
        write_header(memory, plan.num_slots, slot_bytes, incarnation, nonce)
        return MemoryTier(MappableArena(memory, None), make_policy(plan.eviction, plan.num_slots))

    return ServerOptions(incarnation, make_memory, CLIENT_TIMEOUT_S, max_pinned_share, plan.write_back)


def flip_a_bit(memory: MemoryTier | None, tiers: Sequence[DictTier], random: Random) -> bool:
    """Change one bit of a stored block; False if there is none."""
    arena = memory.arena if memory is not None else None
    slots = [slot for slot in range(arena.num_slots) if arena.state(slot) is SlotState.READY] if arena is not None else []
    blocks = [value[1] for tier in tiers for _, value in sorted(tier.values.items())]
    chosen = random.randrange(len(slots) + len(blocks)) if slots or blocks else -1
    if chosen < 0:
        return False
    content: memoryview | bytearray
    if chosen < len(slots):
        assert arena is not None
        content = arena.content(slots[chosen], arena.num_bytes(slots[chosen]))
    else:
        content = blocks[chosen - len(slots)]
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    return True


def leftovers_of(machine: ServerState) -> dict[str, int]:
    """Count resources that a store must not hold once every client is done."""
    memory = machine.memory
    if memory is None:
        return {}
    arena = memory.arena
    return {
        "pinned slots": arena.num_pinned,
        "slots that a silent client may write": machine.num_quarantined,
        "slots without an owner": arena.num_slots - arena.num_free - len(memory),
        "slots being written": sum(arena.state(slot) is SlotState.WRITING for slot in range(arena.num_slots)),
    }


class SimStoreServer:
    """One incarnation of the store that workers share. ``processes`` finds a client's process by the client's id."""

    def __init__(self, host: Host, plan: TierPlan, seed: int, tiers: Sequence[DictTier], processes: dict[str, Process]) -> None:
        self.host = host
        self.machine = ServerState(machine_options(plan, SeededIds(seed), 0.5), tiers)
        self._plan = plan
        self._random = Random(seed)
        self._tiers = tiers
        self._runners = [TierRunner(tier) for tier in tiers]
        self._processes = processes
        self._replies: dict[bytes, Queue] = {}
        self._server = host.network.listen(host.process, store_address(host.process.name), self._on_frame)
        self._is_calm = False
        host.process.call_later(_TIMER_S, self._on_timer)

    def calm_down(self) -> None:
        """Stop losing messages."""
        self._is_calm = True

    def corrupt(self) -> bool:
        """Change a bit of a stored block; False if there is none."""
        return flip_a_bit(self.machine.memory, self._tiers, self._random)

    def leftovers(self) -> list[str]:
        """Return resources that are held without an owner."""
        return [f"{self.host.process.name}: {count} {what} left" for what, count in leftovers_of(self.machine).items() if count]

    def _on_frame(self, peer: bytes, frame: bytes) -> None:
        if not self._is_calm and self._plan.question_loss_rate and self._random.random() < self._plan.question_loss_rate:
            return
        first, *blocks = _unpack(frame)
        message = decode_to_store(first)
        self.host.log("is asked", message)
        self._follow(self.machine.on_parcel(peer, message, blocks, self._now()))

    def _on_timer(self) -> None:
        self._follow(self.machine.on_timer(self._now()))
        self.host.process.call_later(_TIMER_S, self._on_timer)

    def _follow(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendParcel(client, parcel):
                    self._reply(client, _pack(encode_to_client(parcel.message), parcel.blocks))
                case WatchProcess(client_id):
                    self._watch(client_id)
                case StartJob(job):
                    self._start(job)

    def _reply(self, client: bytes, frame: bytes) -> None:
        if not self._is_calm and self._random.random() < self._plan.loss_rate:
            self.host.troubles.note(Kind.STORE, [self.host.process.name], REQUEST_TIMEOUT_S)
            return
        queue = self._replies.setdefault(client, Queue(self.host.process, self.host.loop, self._reply_delay_s))

        def send() -> None:
            self._server.send(client, frame)

        queue.put(send)

    def _reply_delay_s(self) -> float:
        is_late = not self._is_calm and self._random.random() < self._plan.late_rate
        if not is_late:
            return 0.0
        late_s = self._random.uniform(0.0, self._plan.late_s)
        self.host.troubles.note(Kind.STORE, [self.host.process.name], late_s)
        return late_s

    def _watch(self, client_id: str) -> None:
        def tell() -> None:
            self.host.process.call_later(_NOTICE_DEATH_S, lambda: self._follow(self.machine.on_process_died(client_id)))

        client = self._processes[client_id]
        if client.is_alive:
            client.on_death(tell)
            self._follow(self.machine.on_watched(client_id))
        else:
            tell()

    def _start(self, job: TierJob) -> None:
        def run() -> None:
            self._runners[job.tier].run(job)
            self._follow(self.machine.on_job_done(job))

        self.host.process.call_later(self._random.uniform(0.0, _JOB_S), run)

    def _now(self) -> float:
        return self.host.process.clock.now()


class SimStoreClientBase(StoreClientBase):
    """A store as a worker uses it. ``on_progress`` is called when a ticket may be done; ``watch`` sees the pool's reads."""

    on_progress: Callable[[], None]
    watch: CopyWatch

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free once every request has ended."""
        return {"open calls": self._machine.calls.num_open, "pinned gets": self._machine.calls.num_pinned_gets}


class SimStoreClient(SimStoreClientBase):
    """A client of the store at ``address``. Its thread works in sequence, and does nothing else while it copies."""

    def __init__(
        self, host: Host, address: str, options: ClientOptions, ids: SeededIds, arena_of: Callable[[int], Arena | None]
    ) -> None:
        super().__init__(ClientState(options, ids), host.process.clock)
        self._address = address
        self._host = host
        self.on_progress = _nothing
        self._arena_of = arena_of
        self._actions: deque[ClientAction] = deque()
        self._waiting: deque[Callable[[], None]] = deque()
        self._incarnation = 0  # of the store whose arena is mapped
        self._is_copying = False
        self._timer: Timer | None = None
        self._to_thread = Queue(host.process, host.loop, host.thread_delay_s)
        self._open_link()

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free; a living store must have been found again."""
        return super().leftovers() | {"lost links to the store": not self.is_connected}

    def close(self) -> None:
        """See ``BlockStore``. Here a worker ends only by its death."""

    def _on_timer(self) -> None:
        self._do(lambda: self._machine.on_timer(self._clock.now()))

    def _carry_out(self) -> None:
        self._to_thread.put(lambda: self._do(_nothing))

    def _do(self, call: Callable[[], None]) -> None:
        """Let the thread do a piece of work, and its consequences."""
        if self._is_copying:
            self._waiting.append(call)
            return
        call()
        self._follow_all()

    def _follow_all(self) -> None:
        while not self._is_copying:
            self._actions.extend(self._machine.take_actions())
            if not self._actions:
                break
            self._follow(self._actions.popleft())
        self._arm_timer()
        self.on_progress()

    def _follow(self, action: ClientAction) -> None:
        match action:
            case SendToStore(parcel):
                for block in parcel.blocks:
                    self.watch.on_copy(memoryview(block))
                if not self._link.send(_pack(encode_to_store(parcel.message), parcel.blocks)):
                    self._machine.on_link_lost(self._clock.now())
            case MapArena(_, incarnation):
                self._incarnation = incarnation
                self._machine.on_mapped(self._arena_of(incarnation))
            case CopyIn(number, copies):
                self._copy(number, copies)

    def _copy(self, number: int, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
        """Copy in two halves, so that the process may freeze or die in between."""
        if not self._machine.calls.is_open(number):
            return
        self._is_copying = True
        self._copy_half(copies, 0)

        def finish() -> None:
            self._copy_half(copies, 1)
            self._is_copying = False
            self._machine.calls.on_copied(number, self._clock.now())
            self._follow_all()
            while self._waiting and not self._is_copying:
                self._do(self._waiting.popleft())

        self._host.process.call_later(self._host.world.random.uniform(0.0, _COPY_S), finish)

    def _copy_half(self, copies: Sequence[tuple[memoryview, memoryview]], half: int) -> None:
        arena = self._arena_of(self._incarnation)
        for source, target in copies:
            self.watch.on_copy(source)
            if arena is not None:  # otherwise the store's process is gone
                _check_reserved(arena, target)
            middle = source.nbytes // 2
            part = slice(0, middle) if half == 0 else slice(middle, None)
            np.frombuffer(target, np.uint8)[part] = np.frombuffer(source, np.uint8)[part]

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._host.process.call_at(self._machine.next_timer(), self._on_timer)

    # ---- the link ----------------------------------------------------------------------------------------------------

    def _open_link(self) -> None:
        link = Link(self._host.network, self._host.process, self._address, self._on_frame, lambda: self._on_lost(link))
        self._link = link
        self._do(lambda: self._machine.on_link_up(self._clock.now()))

    def _on_lost(self, link: Link) -> None:
        if link is self._link:
            self._host.log("loses the store")
            self._do(lambda: self._machine.on_link_lost(self._clock.now()))
            self._host.process.call_later(_RECONNECT_S, self._open_link)

    def _on_frame(self, frame: bytes) -> None:
        first, *blocks = _unpack(frame)
        message = decode_to_client(first)
        self._host.log("store answers", message)
        self._do(lambda: self._machine.on_parcel(message, blocks, self._clock.now()))


class SimEmbeddedStore(SimStoreClientBase):
    """A store inside the worker: everything happens at once in the caller's thread, except copies."""

    def __init__(self, host: Host, plan: TierPlan, block_bytes: int, ids: SeededIds) -> None:
        options = ClientOptions("embedded", block_bytes, request_timeout_s=_FOREVER_S, process=(1, 0))
        super().__init__(ClientState(options, ids), host.process.clock)
        self.machine = ServerState(machine_options(plan, ids, 1.0))
        self.machine.prepare(block_bytes)
        self.on_progress = _nothing
        self._host = host
        self._random = Random(ids.bits(63))
        self._copier = Queue(host.process, host.loop, lambda: self._random.uniform(0.0, _COPY_S))
        self._machine.on_timer(self._clock.now())  # sends the hello
        self._carry_out()
        assert self._machine.state is ConnectionState.UP

    def corrupt(self) -> bool:
        """Change a bit of a stored block; False if there is none."""
        return flip_a_bit(self.machine.memory, (), self._random)

    def leftovers(self) -> dict[str, int]:
        """Count resources that must be free once every request has ended."""
        return super().leftovers() | leftovers_of(self.machine)

    def close(self) -> None:
        """See ``BlockStore``. Here a worker ends only by its death."""

    def _carry_out(self) -> None:
        while actions := self._machine.take_actions():
            for action in actions:
                self._follow(action)
        self.on_progress()

    def _follow(self, action: ClientAction) -> None:
        match action:
            case SendToStore(parcel):
                self._follow_store(self.machine.on_parcel(b"self", parcel.message, parcel.blocks, self._clock.now()))
            case MapArena():
                assert self.machine.memory is not None
                self._machine.on_mapped(self.machine.memory.arena)
            case CopyIn(number, copies):
                self._copier.put(lambda: self._copy(number, copies))

    def _follow_store(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendParcel(parcel=parcel):
                    self._machine.on_parcel(parcel.message, parcel.blocks, self._clock.now())
                case WatchProcess(client_id):
                    self._follow_store(self.machine.on_watched(client_id))

    def _copy(self, number: int, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
        for source, target in copies:
            self.watch.on_copy(source)
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        self._machine.calls.on_copied(number, self._clock.now())
        self._carry_out()


def _pack(first: bytes, blocks: Sequence[memoryview | bytes]) -> bytes:
    return _HEADER + msgspec.msgpack.encode([first, *map(bytes, blocks)])


def _unpack(frame: bytes) -> list[bytes]:
    return msgspec.msgpack.decode(frame[len(_HEADER) :], type=list[bytes])


def _check_reserved(arena: Arena, target: memoryview) -> None:
    """Check that a slot that a client writes is still reserved: it is neither free nor another block's."""
    base, address = (np.frombuffer(memory, np.uint8).ctypes.data for memory in (arena.content(0, 1), target))
    slot = (address - base) // arena.slot_bytes
    assert arena.word(slot) == slot_word(arena.generation(slot), SlotState.WRITING), f"slot {slot} is written unreserved"


def _nothing() -> None:
    """Do nothing."""
