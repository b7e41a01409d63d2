"""A store's state machine whose clients and tiers are played by the test."""

import math

from core.errors import ConfigError
from kvstore import messages as m
from kvstore.arena import NONCE_BYTES, arena_bytes, write_header
from kvstore.eviction import make_policy
from kvstore.key import pack_keys
from kvstore.memory import MemoryTier
from kvstore.server_state import SendParcel, ServerOptions, ServerState, StartJob, WatchProcess
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.in_memory import MappableArena
from kvstore.tiers.worker import TierRunner

NUM_SLOTS = 8
NONCE = bytes(range(NONCE_BYTES))
INCARNATION = 77


class Store:
    """A machine whose messages are passed by hand; jobs of tiers are done when the test says so."""

    def __init__(self, *, tiers=(), write_back=False, policy="lru", max_block_bytes=math.inf):
        def make_memory(block_bytes):
            if block_bytes > max_block_bytes:
                raise ConfigError(f"no room for a block of {block_bytes} bytes")
            memory = memoryview(bytearray(arena_bytes(NUM_SLOTS, BLOCK_BYTES)))
            write_header(memory, NUM_SLOTS, BLOCK_BYTES, INCARNATION, NONCE)
            return MemoryTier(MappableArena(memory, None), make_policy(policy, NUM_SLOTS))

        self.machine = ServerState(ServerOptions(INCARNATION, make_memory, write_back=write_back), tiers)
        self.runners = [TierRunner(tier) for tier in tiers]
        self.jobs, self.watched, self.now = [], [], 0.0

    def say(self, client, message, blocks=()):
        return self.take(self.machine.on_parcel(client, message, blocks, self.now))

    def take(self, actions):
        self.jobs += [action.job for action in actions if isinstance(action, StartJob)]
        watched = [action.client_id for action in actions if isinstance(action, WatchProcess)]
        self.watched += watched
        parcels = [action.parcel for action in actions if isinstance(action, SendParcel)]
        for client_id in watched:
            parcels += self.take(self.machine.on_watched(client_id))
        return parcels

    def finish_jobs(self):
        parcels = []
        while self.jobs:
            job = self.jobs.pop(0)
            self.runners[job.tier].run(job)
            parcels += self.take(self.machine.on_job_done(job))
        return parcels

    def greet(self, client, *, is_local=True):
        (welcome,) = self.say(client, m.Hello(client_id=client.decode(), session=1, block_bytes=BLOCK_BYTES))
        assert isinstance(welcome.message, m.Welcome)
        if is_local:
            (attached,) = self.say(client, m.Attach(nonce=NONCE, pid=1, start_ticks=0))
            assert attached.message == m.Attached()

    def put(self, client, blocks, number=1):
        message = m.Put(
            number=number, keys=pack_keys(block.key for block in blocks), seals=b"".join(block.seal for block in blocks)
        )
        (reply,) = self.say(client, message, [block.content for block in blocks])
        return list(reply.message.stored)

    def get(self, client, blocks, number):
        return self.say(client, m.Get(number=number, keys=pack_keys(block.key for block in blocks)))

    def reserve(self, client, blocks, number):
        sizes = tuple(block.content.nbytes for block in blocks)
        (reply,) = self.say(client, m.Reserve(number=number, keys=pack_keys(block.key for block in blocks), sizes=sizes))
        return reply.message

    @property
    def arena(self):
        return self.machine.memory.arena


def blocks_of(*numbers):
    return [make_block(number) for number in numbers]
