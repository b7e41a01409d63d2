"""The connector against a server that is played by hand: silent, late, forgetful, or not the one it should be."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from types import SimpleNamespace

import msgspec
import pytest

import connectors.lmcache.connector
from connectors.lmcache.client import Calls
from connectors.lmcache.connector import LMCacheConnector
from connectors.lmcache.messages import (
    LMCacheMPConnectorMetadata,
    LoadPages,
    LookupPages,
    PageTransfer,
    SavePages,
    ServerFacts,
    ServerSession,
    moves_of,
)
from connectors.lmcache.tracker import LMCacheMPRequestMetadata
from connectors.lmcache.wire import RequestType, TokenSpan
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection, LMCacheSection
from core.errors import KVFerryError
from core.testing.clock import FakeClock
from core.testing.hash_model import FULL, HashAttention, hash_model_kv_config, hash_model_layout
from tests.support.virtual_loop import VirtualLoop

FACTS = ServerFacts("0.5.6", 64, True)
TOKENS = list(range(256))
HASHES = [bytes([n]) * 16 for n in range(16)]
STORED = [b"", True]
NUM_BLOCKS, BLOCK_SIZE = 16, 32
SETTINGS = LMCacheSection(
    staging_bytes=1 << 16, lookup_timeout_s=1.0, request_timeout_s=5.0, heartbeat_interval_s=2.0, retry_interval_s=1.0
)


class Played:
    """A connector in virtual time, and the requests to the server, by operation, that have no answer yet.

    ``answers`` are those to lookups, ``ended`` the loads that were reported: error, invalid blocks, usage.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, attentions: tuple[HashAttention, ...] = FULL) -> None:
        self.clock = FakeClock()
        self.loop = VirtualLoop(self.clock)
        self.facts: ServerFacts = FACTS
        self.asked: list[tuple[Calls, int, RequestType, list[object]]] = []
        self.answers: list[tuple[str, int]] = []
        self.ended: dict[str, SimpleNamespace] = {}
        self.is_closed = False  # the latest connection
        self._stopping: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        monkeypatch.setattr(connectors.lmcache.connector, "fetch_facts", lambda *_: self.facts)
        monkeypatch.setattr(connectors.lmcache.connector, "LMCacheClient", self._new_client)
        layout = hash_model_layout(BLOCK_SIZE, len(attentions))
        context = connector_context(
            "decode",
            layout=layout,
            connector=ConnectorSection(name="lmcache", lmcache=SETTINGS, transfer_deadline_s=30.0),
        )
        self.connector = LMCacheConnector(dataclasses.replace(context, clock=self.clock))
        self.worker, self.scheduler = self.connector.worker, self.connector.scheduler
        size = layout.block_bytes
        buffer = bytearray(NUM_BLOCKS * size)
        self.worker.register_kv_caches(
            SimpleNamespace(buffer=buffer, num_blocks=NUM_BLOCKS, block_bytes=size, seals=object(), device="cpu")
        )
        config = hash_model_kv_config(NUM_BLOCKS, BLOCK_SIZE, attentions)
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(kv_cache_config=config))
        self.scheduler.on_lookup_answer = lambda *answer: self.answers.append(answer)

    # ---- the server ----------------------------------------------------------------------------------------------------

    def start(self, facts: ServerFacts = FACTS) -> None:
        self.facts = facts
        self.starting = self.loop.create_task(self.connector.start())
        self.loop.settle()

    def connect(self) -> None:
        """Go through an attempt with a server that answers."""
        if self.loop.jobs or not self.asked:
            self.tick(SETTINGS.retry_interval_s)
        self.answer(RequestType.REGISTER_KV_CACHE)
        assert self.connector.is_connected

    def lose(self) -> None:
        """Break the connection."""
        self.calls.lose()
        self.tick()
        assert not self.connector.is_connected

    def begin_stop(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = self.loop.create_task(self.connector.stop())
            self.tick()
        return self._stopping

    def stop(self) -> None:
        stopping = self.begin_stop()
        while not stopping.done():
            self.tick(0.1)
        self.loop.close()

    def _new_client(self, _zmq, _address, counts, _on_death) -> SimpleNamespace:
        def record(frames: list[bytes]) -> None:
            uid, operation, *arguments = map(msgspec.msgpack.decode, frames)
            self.asked.append((calls, uid, RequestType(operation), arguments))

        async def close() -> None:
            self.is_closed = True

        self.calls = calls = Calls(record, counts)
        return SimpleNamespace(calls=calls, close=close)

    def asks(self, operation: RequestType) -> list[object] | None:
        """Return the arguments of the oldest open request of a kind, None if there is none."""
        return next((arguments for *_, kind, arguments in self.asked if kind is operation), None)

    def answer(self, operation: RequestType, result: object = None) -> None:
        """Answer the oldest open request of a kind."""
        found = next(request for request in self.asked if request[2] is operation)
        self.asked.remove(found)
        found[0].on_reply(found[1], result)
        self.loop.settle()
        self._collect()

    # ---- the engine ----------------------------------------------------------------------------------------------------

    @property
    def server(self) -> ServerSession:
        found = self.scheduler.server
        assert found is not None
        return found

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.loop.settle()
        self._collect()

    def tell(self, **news: object) -> None:
        self.worker.start_load_kv(LMCacheMPConnectorMetadata(**news))
        self.worker.wait_for_save()
        self.tick()

    def look_up(self, name: str = "s", server: ServerSession | None = None) -> None:
        self.tell(lookups=[LookupPages(TokenSpan(name, TOKENS), 256, server or self.server)])

    def find(self, num_chunks: int, name: str = "s") -> None:
        """Look up and be answered."""
        self.look_up(name)
        self.answer(RequestType.LOOKUP)
        self.answer(RequestType.QUERY_PREFETCH_STATUS, num_chunks)
        assert self.answers.pop() == (name, 64 * num_chunks)

    def load(self, start: int = 0, end: int = 256, request_id: str = "r", name: str = "s", num_skipped: int = 0) -> None:
        chunks = self.chunks(start, end, request_id, name, num_skipped)
        self.tell(loads=[LoadPages(self.transfer(chunks), end - start - num_skipped)], unclaimed=[name])

    def save(self, name: str = "s") -> SavePages:
        """Copy two chunks."""
        transfer = self.transfer(self.chunks(0, 128, "r", name))
        save = SavePages(next(self._numbers), transfer, tuple(self.server.staging.take_to_save(4)))
        self.tell(saves=[save])
        return save

    def chunks(self, start, end, request_id, name, num_skipped=0):
        block_ids = (tuple(range(1 + start // 32, 1 + end // 32)),)
        return LMCacheMPRequestMetadata(request_id, TokenSpan(name, TOKENS), start, end, block_ids, num_skipped)

    def transfer(self, chunks: LMCacheMPRequestMetadata) -> PageTransfer:
        return PageTransfer(chunks, self.server, tuple(moves_of(chunks, 32, HASHES, 2)))

    # ---- the copying thread --------------------------------------------------------------------------------------------

    def job(self, kind: type[LoadPages] | type[SavePages]) -> object | None:
        """Return what the copying thread has to do first of a kind."""
        return next((args[0] for args, future in self.loop.jobs if isinstance(args[0], kind) and not future.done()), None)

    def finish(self, kind: type[LoadPages] | type[SavePages], result: dict[int, KVFerryError] | None = None) -> None:
        """Let the copying thread end its first job of a kind."""
        found = next(job for job in self.loop.jobs if isinstance(job[0][0], kind))
        self.loop.jobs.remove(found)
        if not found[1].done():
            found[1].set_result(result)
        self.tick()

    def _collect(self) -> None:
        output = self.worker.get_transfer_results(set())
        for request_id in output.finished_recving:
            assert request_id not in self.ended, "reported twice"
            self.ended[request_id] = SimpleNamespace(
                error=output.load_errors.get(request_id) or output.failed_recving.get(request_id),
                is_lost=request_id in output.failed_recving,
                invalid_block_ids=output.invalid_block_ids,
                usage=output.transfer_usage.get(request_id),
            )
