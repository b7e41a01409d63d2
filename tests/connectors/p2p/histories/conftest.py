"""A worker whose blocks are read, for random histories: a real agent, its leases and seals, and memory that it rewrites."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest

from connectors.p2p.actions import LeaseGrant, Reply
from connectors.p2p.agent import P2PAgent
from connectors.p2p.producer.handshake import HandshakeResponder
from connectors.p2p.transport.interface import regions_of
from connectors.reports import SendingEnded
from connectors.testing.inproc_transport import InprocTransport
from core.digest import BlockDigester
from core.kv.seals import ExpectedSeal
from core.testing.hash_model import SLOT_BYTES, hash_model_region
from core.wire.kv import GroupBlocks, HandshakeReply

NAMES = ("shm", "tcp")
NUM_BLOCKS = 24
RATE_OF_NO_SHM = 0.4
RATE_OF_STUBBORN = 0.2


class Owner:
    """One incarnation of a worker whose blocks are read. ``contents`` is its blocks' content, ``torn`` those being written.

    Some lives cannot be read by shm, and some are stubborn: they choose shm even if a reader does not offer it.
    """

    def __init__(self, history, address, incarnation):
        self.rng, self.fabric, self.clock, self.address, self.incarnation = (
            history.rng,
            history.fabric,
            history.clock,
            address,
            incarnation,
        )
        self.block_size = history.remote_size
        digest = BlockDigester(self.block_size * SLOT_BYTES).digest
        self.region = hash_model_region(NUM_BLOCKS, self.block_size, incarnation, digest)
        self.transports = {name: InprocTransport(self.fabric) for name in NAMES}
        for transport in self.transports.values():
            transport.register(regions_of(self.region))
        self.offers = {name: transport.describe() for name, transport in self.transports.items()}
        if self.rng.random() < RATE_OF_NO_SHM:
            self.offers["shm"] = b"of no use"
        self.is_stubborn = self.rng.random() < RATE_OF_STUBBORN
        identity = history.make_identity("prefill", incarnation, layout=self.region.layout)
        responder = HandshakeResponder(identity, NUM_BLOCKS, self.offers, has_digests=True)
        self.agent = P2PAgent(identity, NAMES, history.settings, responder)
        self.is_alive, self.is_frozen = True, False
        self.leased: dict[str, tuple[int, ...]] = {}  # by request id
        self.generations = [0] * NUM_BLOCKS
        self.hashes, self.contents = [b""] * NUM_BLOCKS, [b""] * NUM_BLOCKS
        self.torn: set[int] = set()
        for block_id in range(NUM_BLOCKS):
            self.begin_to_write(block_id)
            self.end_writing(block_id)

    def die(self):
        self.is_alive = False
        for transport in self.transports.values():
            transport.close()

    def freeze(self, is_frozen):
        self.is_frozen = is_frozen
        for transport in self.transports.values():
            self.fabric.set_frozen(transport.number, is_frozen)

    # ---- its blocks

    def begin_to_write(self, block_id):
        self.region.seals.break_seals([block_id])
        self.generations[block_id] += 1
        self.hashes[block_id], self.contents[block_id] = self.rng.randbytes(16), self.rng.randbytes(self.region.block_bytes)
        self._write(block_id, self.region.block_bytes // 2)
        self.torn.add(block_id)

    def end_writing(self, block_id):
        if block_id in self.torn:
            self.torn.remove(block_id)
            self._write(block_id, self.region.block_bytes)
            seal = ExpectedSeal(self.generations[block_id], 0, self.hashes[block_id], self.block_size)
            self.region.seals.seal(block_id, seal)

    def _write(self, block_id, num_bytes):
        start = block_id * self.region.block_bytes
        self.region.buffer[start : start + num_bytes] = self.contents[block_id][:num_bytes]

    def rewrite_something(self):
        block_id = self.rng.randrange(NUM_BLOCKS)
        if block_id in self.torn:
            self.end_writing(block_id)
        elif not any(block_id in block_ids for block_ids in self.leased.values()):
            self.begin_to_write(block_id)

    # ---- its readers

    def make_handoff(self, name):
        """Hold some blocks for a reader."""
        block_ids = tuple(self.rng.sample(range(1, NUM_BLOCKS), self.rng.randint(1, 6)))
        for block_id in block_ids:
            self.end_writing(block_id)
        self.leased[name] = block_ids
        self.take_in(LeaseGrant(f"t-{name}", name, len(block_ids)))
        generations = tuple(self.generations[block_id] for block_id in block_ids)
        hashes = tuple(self.hashes[block_id] for block_id in block_ids)
        return GroupBlocks(group_id=0, block_ids=block_ids, generations=generations, block_hashes=hashes)

    def connect(self):
        return Link(self)

    def take_in(self, event):
        return self.agent.producer.handlers[type(event)](event, self.clock.now())

    def answer(self, message):
        actions = self.take_in(message)
        self.end_leases(actions)
        return [self._own_way(action.message) for action in actions if isinstance(action, Reply)]

    def _own_way(self, reply):
        """A stubborn owner chooses its first transport even if it is not offered."""
        if self.is_stubborn and isinstance(reply, HandshakeReply):
            return msgspec.structs.replace(reply, transport="shm", transport_metadata=self.offers["shm"])
        return reply

    def end_leases(self, actions):
        """Overwrite most blocks that have no reader any more."""
        for action in actions:
            if isinstance(action, SendingEnded):
                block_ids = set(self.leased.pop(action.request_id, ()))
                for block_id in block_ids.difference(*self.leased.values()):
                    if self.rng.random() < 0.7:
                        self.begin_to_write(block_id)


@dataclass
class Link:
    """A control connection to one incarnation of an owner."""

    owner: Owner
    questions: deque = field(default_factory=deque)
    answers: deque = field(default_factory=deque)


@pytest.fixture
def make_owner():
    return Owner
