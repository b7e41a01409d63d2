"""A store, its tiers and its clients under a virtual clock, with faults that follow from a seed.

Owns the network between the real state machines, the time that copies and tiers take, and the faults: lost messages, broken
links, clients that freeze in mid-copy or die, a store that is restarted, bytes that change in the arena and in a tier. Checks
while it runs that nobody is given a wrong byte and that no slot is reused while a living client may write it, and at the end
that every call was answered and nothing is held. A failing seed replays exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import CorruptBlock, StaleBlock
from core.ids import SeededIds
from core.testing.clock import FakeClock
from kvstore.arena import NONCE_BYTES, Arena, SlotState, arena_bytes, slot_word, write_header
from kvstore.base import GetTicket, PutTicket, Ticket
from kvstore.client_base import StoreClientBase
from kvstore.client_state import ClientAction, ClientOptions, ClientState, CopyIn, MapArena, SendToStore
from kvstore.eviction import make_policy
from kvstore.memory import MemoryTier
from kvstore.messages import ArenaFile, ToClient, ToStore
from kvstore.server_state import Action, SendParcel, ServerOptions, ServerState, StartJob, WatchProcess
from kvstore.testing.blocks import make_block
from kvstore.tiers.base import Tier, TierBlock, TierJob
from kvstore.tiers.worker import TierRunner

SLOT_BYTES = 4096
BLOCK_BYTES = 64
NUM_BLOCKS = 16
REQUEST_TIMEOUT_S = 1.0
CLIENT_TIMEOUT_S = 3.0
QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """How likely each fault is: ``loss`` per message, the others per step of a client's work."""

    loss: float = 0.0
    freeze: float = 0.0
    death: float = 0.0
    restart: float = 0.0
    broken_link: float = 0.0
    arena_corruption: float = 0.0
    tier_corruption: float = 0.0


class SimArena(Arena):
    """An arena that says it can be found by other processes."""

    def describe(self) -> ArenaFile:
        """Return a file that only the simulation can map."""
        return ArenaFile(pid=1, fd=0, inode=1, num_bytes=self._memory.nbytes)


class DictTier(Tier):
    """A tier in a dictionary; ``must_be_asked`` makes it one like Redis."""

    name = "dict"

    def __init__(self, *, must_be_asked: bool = False) -> None:
        self.values: dict[bytes, tuple[bytes, bytearray]] = {}
        self._must_be_asked = must_be_asked

    def knows(self, key: bytes) -> bool | None:
        """Look, unless it has to be asked."""
        return None if self._must_be_asked else key in self.values

    def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Look."""
        return [key in self.values for key in keys]

    def load(self, key: bytes, target: memoryview) -> TierBlock | None:
        """Copy out."""
        if key not in self.values:
            return None
        seal, content = self.values[key]
        target[: len(content)] = content
        return TierBlock(len(content), seal)

    def save(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Copy in."""
        self.values.setdefault(key, (seal, bytearray(block)))
        return True

    def remove(self, key: bytes) -> None:
        """Forget."""
        self.values.pop(key, None)

    def close(self) -> None:
        """Keep everything: it outlives the store."""


class SimClient(StoreClientBase):
    """A client whose carrier is the simulation."""

    def __init__(self, sim: SimStore, name: str, *, is_local: bool) -> None:
        options = ClientOptions(name, BLOCK_BYTES, REQUEST_TIMEOUT_S, 0.25, (1, 0) if is_local else None)
        super().__init__(ClientState(options, sim.ids), sim.clock)
        self.name = name
        self.machine = self._machine
        self.is_dead = False
        self.is_frozen = False
        self.inbox: list[Callable[[], None]] = []  # what waits for the end of a freeze or a copy
        self.is_copying = False
        self.tickets: list[tuple[float, Ticket]] = []
        self._sim = sim

    def close(self) -> None:
        """Leave in peace."""
        with self._lock:
            self._machine.say_goodbye()
            self._carry_out()

    def _carry_out(self) -> None:
        for action in self._machine.take_actions():
            self._sim.follow_client(self, action)


class SimStore:
    """Everything of one run. ``violations`` is what was found wrong."""

    def __init__(self, seed: int, faults: StoreFaults, *, num_clients: int = 3, write_back: bool = False) -> None:
        self.rng = random.Random(seed)
        self.ids = SeededIds(seed)
        self.clock = FakeClock()
        self.faults = faults
        self.violations: list[str] = []
        self.num_reads = 0
        self.num_rejected = 0
        self.num_restarts = 0
        self._write_back = write_back
        self._is_over = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._last_event = 0
        self._last_arrival: dict[tuple[str, bool], float] = {}
        self._watched: set[str] = set()
        self._blocks = [make_block(number, BLOCK_BYTES) for number in range(NUM_BLOCKS)]
        self.tiers = [DictTier(), DictTier(must_be_asked=True)]
        self._runners = [TierRunner(tier) for tier in self.tiers]
        self.clients: list[SimClient] = []
        self.store = self._new_store()
        for _ in range(num_clients):
            self._add_client()
        self._tick()

    def run(self, seconds: float) -> None:
        """Let the clients work for a while under faults, then in peace, and check what is left."""
        for client in self.clients:
            self._at(self.rng.random(), self._work_of(client))
        self._run_until(self.clock.now() + seconds)
        self._is_over = True
        for client in self.clients:
            self._thaw(client)
        self._run_until(self.clock.now() + QUIET_S)
        self._check_end()

    def follow_client(self, client: SimClient, action: ClientAction) -> None:
        """Carry out what a client's machine wants."""
        match action:
            case SendToStore():
                message = action.parcel.message
                blocks = [bytes(block) for block in action.parcel.blocks]
                self._transmit(client, True, lambda: self._to_store(client, message, blocks))
            case MapArena():
                is_there = self.store.memory is not None and self.store.incarnation == action.incarnation
                client.machine.on_mapped(self.store.memory.arena if is_there and self.store.memory else None)
                client._carry_out()
            case CopyIn():
                self._start_copy(client, action)

    def _follow_store(self, store: ServerState, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendParcel():
                    client = next((c for c in self.clients if c.name.encode() == action.client), None)
                    message, blocks = action.parcel.message, [bytes(block) for block in action.parcel.blocks]
                    if client is not None:
                        self._transmit(client, False, self._delivery(client, message, blocks))
                case WatchProcess():
                    self._watched.add(action.client_id)
                case StartJob():
                    self._at(self.rng.random() * 0.2, self._job(store, action.job))

    def _to_store(self, client: SimClient, message: ToStore, blocks: Sequence[bytes]) -> None:
        store = self.store
        self._follow_store(store, store.on_parcel(client.name.encode(), message, blocks, self.clock.now()))

    def _delivery(self, client: SimClient, message: ToClient, blocks: Sequence[bytes]) -> Callable[[], None]:
        def deliver() -> None:
            client.machine.on_parcel(message, blocks, self.clock.now())
            client._carry_out()

        return lambda: self._when_awake(client, deliver)

    def _job(self, store: ServerState, job: TierJob) -> Callable[[], None]:
        def run() -> None:
            self._runners[job.tier].run(job)
            if store is self.store:
                self._follow_store(store, store.on_job_done(job))

        return run

    def _transmit(self, client: SimClient, to_store: bool, arrive: Callable[[], None]) -> None:
        """Deliver after a while, in order, or never."""
        if not self._is_over and self.rng.random() < self.faults.loss:
            return
        way = (client.name, to_store)
        time = max(self.clock.now() + self.rng.random() * 0.05, self._last_arrival.get(way, 0.0))
        self._last_arrival[way] = time
        store = self.store
        self._at(time - self.clock.now(), lambda: arrive() if store is self.store else None)

    def _start_copy(self, client: SimClient, action: CopyIn) -> None:
        """Copy in two halves, between which the client may freeze or die."""
        if not client.machine.is_open(action.number):
            return
        client.is_copying = True
        store = self.store

        def copy_half(half: int) -> None:
            for source, target in action.copies:
                middle = source.nbytes // 2
                part = slice(0, middle) if half == 0 else slice(middle, None)
                self._check_late_write(store, target)
                np.copyto(np.frombuffer(target, np.uint8)[part], np.frombuffer(source, np.uint8)[part])

        def finish() -> None:
            copy_half(1)
            client.is_copying = False
            client.machine.on_copied(action.number, self.clock.now())
            client._carry_out()
            self._drain(client)

        copy_half(0)
        self._at(self.rng.random() * 0.1, lambda: self._when_thawed(client, finish))

    def _check_late_write(self, store: ServerState, target: memoryview) -> None:
        """A slot that is written by a living client must be reserved, and be nobody else's."""
        memory = store.memory
        if store is not self.store or memory is None:
            return  # as below: the memory of a store that is gone
        base = np.frombuffer(memory.arena.content(0, 1), np.uint8).__array_interface__["data"][0]
        slot = (np.frombuffer(target, np.uint8).__array_interface__["data"][0] - base) // memory.arena.slot_bytes
        if not 0 <= slot < memory.arena.num_slots:
            return
        if memory.arena.word(slot) != slot_word(memory.arena.generation(slot), SlotState.WRITING):
            self.violations.append(f"slot {slot} is {memory.arena.state(slot).name} while it is written")

    def _work_of(self, client: SimClient) -> Callable[[], None]:
        def work() -> None:
            if client.is_dead or self._is_over:
                return
            self._work(client)
            self._at(self.rng.random() * 0.4, lambda: self._when_awake(client, work))

        return lambda: self._when_awake(client, work)

    def _work(self, client: SimClient) -> None:
        self._maybe_fail(client)
        if client.is_dead or client.is_frozen:
            return
        blocks = self.rng.sample(self._blocks, self.rng.randint(1, 5))
        keys = [block.key for block in blocks]
        ticket: Ticket
        match self.rng.choice(["lookup", "get", "get", "put", "put"]):
            case "lookup":
                ticket = client.lookup(keys)
            case "get":
                ticket = got = client.get(keys)
                self._at(self.rng.random() * 3, lambda: self._when_awake(client, lambda: self._read(client, got)))
            case _:
                sources = [memoryview(bytearray(block.content)) for block in blocks]
                ticket = stored = client.put(keys, sources, [block.seal for block in blocks])
                self._at(0.0, lambda: self._spoil(client, stored, sources))
        client.tickets.append((self.clock.now(), ticket))

    def _spoil(self, client: SimClient, ticket: PutTicket, sources: Sequence[memoryview]) -> None:
        """Use the memory of a put for something else as soon as it is done."""
        if not ticket.is_done and not client.is_dead:
            self._at(0.05, lambda: self._spoil(client, ticket, sources))
            return
        for source in sources:
            source[:] = bytes(len(source))

    def _read(self, client: SimClient, ticket: GetTicket) -> None:
        """Read what a get has brought, however late, and give it back."""
        by_key = {block.key: block for block in self._blocks}
        for found in ticket.blocks:
            if found is not None:
                target = memoryview(bytearray(found.content.nbytes))
                try:
                    client.copy_out(found, target)
                except (CorruptBlock, StaleBlock):
                    self.num_rejected += 1
                    continue
                self.num_reads += 1
                if target != by_key[found.key].content:
                    self.violations.append(f"a wrong block passed for {found.key.block_hash.hex()}")
        client.release(ticket)

    def _maybe_fail(self, client: SimClient) -> None:
        chance, faults = self.rng.random, self.faults
        if chance() < faults.restart:
            self._restart()
        if chance() < faults.broken_link:
            client.machine.on_link_lost(self.clock.now())
        if chance() < faults.arena_corruption and self.store.memory is not None:
            arena = self.store.memory.arena
            slot = self.rng.randrange(arena.num_slots)
            if arena.state(slot) is SlotState.READY:
                arena.content(slot, BLOCK_BYTES)[self.rng.randrange(BLOCK_BYTES)] ^= 1 << self.rng.randrange(8)
        if chance() < faults.tier_corruption:
            values = self.rng.choice(self.tiers).values
            if values:
                values[self.rng.choice(sorted(values))][1][self.rng.randrange(BLOCK_BYTES)] ^= 1 << self.rng.randrange(8)
        if chance() < faults.freeze:
            client.is_frozen = True
            self._at(self.rng.random() * 2.5 * CLIENT_TIMEOUT_S, lambda: self._thaw(client))
        elif chance() < faults.death:
            self._kill(client)

    def _kill(self, client: SimClient) -> None:
        client.is_dead = True
        self.clients.remove(client)
        if client.name in self._watched:
            store = self.store
            self._at(0.01, lambda: self._follow_store(store, store.on_process_died(client.name)))
        self._at(0.1, self._work_of(self._add_client()))

    def _restart(self) -> None:
        self.num_restarts += 1
        self.store = self._new_store()
        self._watched.clear()
        for client in self.clients:
            if self.rng.random() < 0.5:
                self._when_awake(client, lambda client=client: client.machine.on_link_lost(self.clock.now()))  # type: ignore[misc]

    def _new_store(self) -> ServerState:
        incarnation = self.ids.bits(64)

        def make_memory(_: int) -> MemoryTier:
            num_slots = 8
            memory = memoryview(bytearray(arena_bytes(num_slots, SLOT_BYTES)))
            nonce = self.ids.bits(8 * NONCE_BYTES).to_bytes(NONCE_BYTES, "little")
            write_header(memory, num_slots, SLOT_BYTES, incarnation, nonce)
            return MemoryTier(SimArena(memory, None), make_policy("arc", num_slots))

        options = ServerOptions(incarnation, make_memory, CLIENT_TIMEOUT_S, write_back=self._write_back)
        return ServerState(options, self.tiers)

    def _add_client(self) -> SimClient:
        client = SimClient(self, f"client-{self.ids.bits(64):x}", is_local=self.rng.random() < 0.7)
        self.clients.append(client)
        return client

    def _tick(self) -> None:
        """Run the timers of all, for ever."""
        self._follow_store(self.store, self.store.on_timer(self.clock.now()))
        for client in self.clients:
            if not (client.is_frozen or client.is_copying):
                client.machine.on_timer(self.clock.now())
                client._carry_out()
        self._at(0.1, self._tick)

    def _when_awake(self, client: SimClient, call: Callable[[], None]) -> None:
        if client.is_dead:
            return
        if client.is_frozen or client.is_copying:
            client.inbox.append(call)
        else:
            call()

    def _when_thawed(self, client: SimClient, call: Callable[[], None]) -> None:
        """For a copy under way, which a freeze interrupts."""
        if client.is_frozen:
            client.inbox.insert(0, call)
        elif not client.is_dead:
            call()

    def _thaw(self, client: SimClient) -> None:
        if client.is_frozen:
            client.is_frozen = False
            if client.is_copying and client.inbox:
                self._at(0.0, client.inbox.pop(0))
            self._drain(client)

    def _drain(self, client: SimClient) -> None:
        while client.inbox and not (client.is_frozen or client.is_copying or client.is_dead):
            client.inbox.pop(0)()

    def _at(self, delay_s: float, call: Callable[[], None]) -> None:
        self._last_event += 1
        heapq.heappush(self._events, (self.clock.now() + max(0.0, delay_s), self._last_event, call))

    def _run_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            time, _, call = heapq.heappop(self._events)
            self.clock.advance(max(0.0, time - self.clock.now()))
            call()
        self.clock.advance(max(0.0, end - self.clock.now()))

    def _check_end(self) -> None:
        for client in self.clients:
            unanswered = [ticket.number for _, ticket in client.tickets if not ticket.is_done]
            if unanswered:
                self.violations.append(f"calls {unanswered} of {client.name} were never answered")
            if not client.is_connected:
                self.violations.append(f"{client.name} has not found its store again")
        memory, store = self.store.memory, self.store
        if memory is None:
            return
        if memory.arena.num_pinned or store.num_quarantined:
            self.violations.append(f"{memory.arena.num_pinned} slots pinned and {store.num_quarantined} quarantined at the end")
        if len(memory) + memory.arena.num_free != memory.arena.num_slots:
            self.violations.append(f"{len(memory)} blocks and {memory.arena.num_free} free slots of {memory.arena.num_slots}")
