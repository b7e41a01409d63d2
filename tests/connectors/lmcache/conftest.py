"""Engines without a model beside an LMCache connector each, and a player of the server's part for what it would not do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import zmq

from connectors.lmcache.connector import LMCacheConnector
from connectors.lmcache.messages import ServerFacts
from connectors.lmcache.staging import PAGE_VERSION, SHM_PREFIX, PageIdentity, PageSealer, Staging
from connectors.lmcache.wire import (
    EVENT,
    CacheKey,
    GroupInfo,
    Namespace,
    RequestType,
    TokenSpan,
    decode_reply,
    encode_call,
    is_done,
    registration,
)
from connectors.testing.contexts import connector_context
from connectors.testing.stepping import call_if_open
from core.clock import SystemClock
from core.config_workers import ConnectorSection, LMCacheSection, SchedulerSection
from core.constants import HASH_BLOCK_SIZE
from core.digest import BlockDigester
from core.engine.core import EngineCore
from core.ids import RandomIds
from core.kv.hashing import BlockHasher
from core.kv.invariants import find_violations
from core.kv.manager import KVCacheManager
from core.kv.seals import layout_fingerprint
from core.request import EngineCoreOutput, NewRequest
from core.sched.scheduler import Scheduler
from core.testing.hash_model import (
    DEFAULT_VOCAB_SIZE,
    FULL,
    HashAttention,
    HashModel,
    expected_kv,
    expected_tokens,
    hash_model_kv_config,
    hash_model_layout,
)
from core.wire.sampling import SamplingParams
from tests.connectors.lmcache.played_server import FACTS, Played
from tests.support.polling import wait_until

BLOCK_SIZE = 32
NUM_BLOCKS = 128
MAX_MODEL_LEN = 2048
NUM_OUTPUT_TOKENS = 4
_CLEAR = 20  # the number of an operation that our connector never asks for


class HashEngine:
    """A real engine around a ``HashModel``, with a connector. Make it in an event loop; it steps there.

    ``outputs`` are the tokens of every request, ``usage`` what its load has cost, if it had one.
    """

    def __init__(
        self,
        settings: LMCacheSection,
        fingerprint: bytes,
        incarnation: int,
        num_blocks: int = NUM_BLOCKS,
        attentions: Sequence[HashAttention] = FULL,
    ) -> None:
        self.attentions = attentions
        self.connector = LMCacheConnector(
            connector_context(
                "decode",
                engine_id=f"engine-{incarnation}",
                incarnation=incarnation,
                model_fingerprint=fingerprint,
                layout=hash_model_layout(BLOCK_SIZE, len(attentions)),
                connector=ConnectorSection(name="lmcache", lmcache=settings, transfer_deadline_s=5.0),
            )
        )
        self.model = HashModel(num_blocks, BLOCK_SIZE, self.connector.worker, incarnation=incarnation, attentions=attentions)
        self.manager = KVCacheManager(
            hash_model_kv_config(num_blocks, BLOCK_SIZE, attentions),
            MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=HASH_BLOCK_SIZE,
            seals=self.model.seals,
        )
        scheduler = Scheduler(
            SchedulerSection(max_num_batched_tokens=128),
            self.manager,
            MAX_MODEL_LEN,
            self.connector.scheduler,
            SystemClock(),
        )
        self.hasher = BlockHasher(fingerprint, HASH_BLOCK_SIZE)
        self.core = EngineCore(scheduler, self.model, self.hasher, DEFAULT_VOCAB_SIZE)
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, EngineCoreOutput] = {}
        self.usage: dict[str, object] = {}
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.connector.worker.set_wakeup(lambda: call_if_open(loop, self._on_wake))

    def _on_wake(self) -> None:
        self.core.wake()
        self._wake.set()

    def add(self, request_id: str, prompt: Sequence[int], num_tokens: int = NUM_OUTPUT_TOKENS, cache_salt: str = "") -> None:
        self.outputs[request_id] = []
        sampling = SamplingParams(max_tokens=num_tokens)
        self.core.add_request(
            NewRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, cache_salt=cache_salt)
        )

    def step(self) -> None:
        for output in self.core.step():
            self.outputs[output.request_id] += output.new_token_ids
            if output.transfer_usage is not None:
                self.usage[output.request_id] = output.transfer_usage
            if output.finish_reason is not None:
                self.ended[output.request_id] = output

    async def until(self, condition: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Step as a worker does: while there is work, else after a wakeup."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0)
                if self.core.has_work():
                    self.step()
                else:
                    self._wake.clear()
                    try:
                        await asyncio.wait_for(self._wake.wait(), 0.05)
                    except TimeoutError:
                        continue

    async def answered(self) -> None:
        """Wait, without a step, until the server has answered a lookup."""
        async with asyncio.timeout(10.0):
            while not self.connector.scheduler._arrived:
                self._wake.clear()
                await self._wake.wait()

    async def run(self, request_id: str, prompt: Sequence[int], **fields: object) -> object:
        """Serve a request to its end, hold its tokens against the oracle, and return what its load has cost."""
        self.add(request_id, prompt, **fields)
        await self.until(lambda: request_id in self.ended)
        self.check(request_id, prompt)
        return self.usage.get(request_id)

    def check(self, request_id: str, prompt: Sequence[int]) -> None:
        tokens = self.outputs[request_id]
        expected = expected_tokens(prompt, len(tokens), attentions=self.attentions)
        assert tokens == expected, f"{request_id} was computed on wrong KV"

    def counts(self) -> dict[str, int]:
        """Return what the connector has counted."""
        return self.connector.counts

    async def settled(self) -> None:
        """Wait until nothing is on its way, and check that nothing is held."""

        def is_settled() -> bool:
            server = self.connector.server
            is_idle = not self.core.has_requests() and not self.connector.scheduler.has_pending_push_work()
            is_idle = is_idle and not self.connector.loads.num_blocks
            return is_idle and (server is None or (not server.sessions and server.view.staging.num_used_pages == 0))

        await self.until(is_settled)
        await self.until(lambda: not self.connector.is_connected or not self._num_half_kept())
        pool = self.manager.block_pool
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert not find_violations(self.manager)
        assert not self.connector.scheduler._trackers
        assert not self.connector.scheduler._servers
        assert not self.connector.scheduler._answers

    def _num_half_kept(self) -> int:
        """Count what the server has answered for and cannot find yet."""
        return ask_status(self.connector._settings.http_address)["storage_manager"]["l1_manager"]["write_locked_count"]


def is_idle(status: dict) -> bool:
    """Return whether the server holds no session and no lock."""
    return status["active_sessions"] == status["storage_manager"]["l1_manager"]["read_locked_count"] == 0


def ask_status(http_address: str) -> dict:
    with urllib.request.urlopen(f"{http_address}/status", timeout=5) as response:
        return json.load(response)


@pytest.fixture
def make_engine() -> type[HashEngine]:
    """The engine, for tests that start it themselves."""
    return HashEngine


@pytest.fixture
def fingerprint(request) -> bytes:
    """A model of the test's own: what others have saved is none of its business."""
    return hashlib.blake2b(request.node.nodeid.encode(), digest_size=16).digest()


@pytest.fixture
def settings(lmcache_server) -> LMCacheSection:
    """Settings for the shared server, with short patience."""
    return LMCacheSection(
        server_address=lmcache_server.server_address,
        http_address=lmcache_server.http_address,
        staging_bytes=1 << 20,
        lookup_timeout_s=5.0,
        request_timeout_s=2.0,
        heartbeat_interval_s=0.2,
        retry_interval_s=0.1,
    )


@pytest.fixture
def start_engine(settings, fingerprint) -> Callable[..., object]:
    """Return a function that starts an engine; used as a context manager."""
    incarnations = iter(range(1, 100))

    @asynccontextmanager
    async def start(
        num_blocks: int = NUM_BLOCKS, attentions: Sequence[HashAttention] = FULL, **changed: object
    ) -> AsyncIterator[HashEngine]:
        engine = HashEngine(
            msgspec.structs.replace(settings, **changed), fingerprint, next(incarnations), num_blocks, attentions
        )
        await engine.connector.start()
        try:
            yield engine
        finally:
            engine.core.shutdown()
            await engine.connector.stop()

    return start


class RawClient:
    """A client of the server that obeys nothing but the wire: for what our own would never send."""

    def __init__(self, server, fingerprint: bytes, block_bytes: int | None = None) -> None:
        layout = hash_model_layout(BLOCK_SIZE)
        if block_bytes is not None:
            layout = msgspec.structs.replace(layout, block_bytes=block_bytes)
        num_bytes = max(1 << 20, 20 * layout.block_bytes)
        self.staging = Staging(f"{SHM_PREFIX}test_{RandomIds().bits(64):x}", num_bytes, layout.block_bytes, BLOCK_SIZE)
        self.namespace = Namespace.of(fingerprint, layout, PAGE_VERSION)
        self.sealer = PageSealer(77, layout_fingerprint(layout), BLOCK_SIZE, BlockDigester(layout.block_bytes))
        self.hasher = BlockHasher(fingerprint, HASH_BLOCK_SIZE)
        self.instance_id = RandomIds().bits(40)
        self._http_address = server.http_address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 5000)
        self._socket.connect(server.server_address)
        self._uid = 0
        groups = [GroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=BLOCK_SIZE)]
        self.call(RequestType.REGISTER_KV_CACHE, *registration(self.instance_id, self.namespace, self.staging.pages, groups))

    def call(self, operation: RequestType | int, *arguments: object) -> object:
        """Send a request and return its result; zmq.Again if there is no reply."""
        self._uid += 1
        self._socket.send_multipart(encode_call(self._uid, operation, *arguments))
        uid, result = decode_reply(self._socket.recv_multipart())
        assert uid == self._uid
        return result

    def fill(self, pages: Sequence[int], prompt: Sequence[int]) -> None:
        """Write the blocks of a prompt into pages, as a good worker does: sealed, and the right bytes."""
        hashes: list[bytes] = []
        self.hasher.extend(hashes, array("i", prompt), ())
        content = expected_kv(prompt)
        size = self.staging.block_bytes
        for index, page in enumerate(pages):
            self.staging.rows[page, :size] = np.frombuffer(content[index * size : (index + 1) * size], dtype=np.uint8)
            block_hash = hashes[(index + 1) * BLOCK_SIZE // HASH_BLOCK_SIZE - 1]
            self.sealer.seal(self.staging.rows[page], PageIdentity(0, block_hash))

    def key(self, session_id: str, token_ids: Sequence[int], worker_id: int | None = 0):
        return self.namespace.key(TokenSpan(session_id, token_ids), 0, len(token_ids), worker_id)

    def store(self, session_id: str, token_ids: Sequence[int], pages: Sequence[int]) -> bool:
        """Save pages; return, once what is kept of them can be found, whether the server says that it has kept them."""
        key = self.key(session_id, token_ids)
        is_kept = is_done(self.call(RequestType.STORE, key, self.instance_id, [list(pages)], EVENT))
        wait_until(lambda: not ask_status(self._http_address)["storage_manager"]["l1_manager"]["write_locked_count"])
        return is_kept

    def hoard(self, num_chunks: int) -> list[CacheKey]:
        """Have chunks kept and locked, so many at a time, until the server has no room; return the keys of the locks.

        Chunks that are not locked yet may also be gone because the server evicts once a second; but not three times in a row.
        """
        pages = self.staging.take_to_save(2 * num_chunks)
        keys: list[CacheKey] = []
        times_dropped = 0
        while times_dropped < 3:
            number = len(keys)
            tokens = [number, *range(2 * BLOCK_SIZE * num_chunks - 1)]
            key = self.key(f"hoard-{self.instance_id}-{number}", tokens, None)
            assert self.store(key.request_id, tokens, pages), "it always says that it has kept them"
            self.call(RequestType.LOOKUP, key, 1)
            while (found := self.call(RequestType.QUERY_PREFETCH_STATUS, key.request_id)) is None:
                continue
            keys.append(key)
            times_dropped = 0 if found == num_chunks else times_dropped + 1
        return keys

    def clear(self) -> None:
        """Have the server drop everything that is not locked."""
        self.call(_CLEAR, True)

    def let_go(self, keys: Sequence[CacheKey]) -> None:
        for key in keys:
            self.call(RequestType.FREE_LOOKUP_LOCKS, key, 1)
            self.call(RequestType.END_SESSION, key.request_id)

    def close(self) -> None:
        try:
            self.call(RequestType.END_SESSION, "s")
            self.call(RequestType.UNREGISTER_KV_CACHE, self.instance_id)
        finally:
            self._context.destroy(linger=0)  # left to the garbage collector it would wait for what was never sent
            self.staging.unlink()


@pytest.fixture
def raw_client(lmcache_server, fingerprint):
    """A client that tells the server what it likes, about the model of the test's engines."""
    client = RawClient(lmcache_server, fingerprint)
    yield client
    client.close()


@pytest.fixture
def full_server(lmcache_server, server_status):
    """Fill the server with what may not be evicted, to the last page; return a function that releases it."""
    wait_until(lambda: is_idle(server_status()))  # what others have locked would be released, at some time, and make room
    sizes = {4 << 20: 4, 1 << 20: 1, 32 << 10: 1, 256: 1}  # bytes of a block, and chunks at a time
    clients = [RawClient(lmcache_server, b"hoard", block_bytes) for block_bytes in sizes]
    clients[0].clear()  # what others have left would be evicted, at some time, and make room
    keys = [client.hoard(count) for client, count in zip(clients, sizes.values(), strict=True)]

    def let_go() -> None:
        for client in clients:
            client.let_go(keys.pop(0))
        clients[0].clear()

    yield let_go
    if keys:
        let_go()
    for client in clients:
        client.close()


@pytest.fixture
def server_status(lmcache_server) -> Callable[[], dict]:
    """Return what the server says of itself."""

    return lambda: ask_status(lmcache_server.http_address)


@pytest.fixture
def start_played(monkeypatch):
    started: list[Played] = []

    def start(facts: ServerFacts = FACTS, attentions: tuple[HashAttention, ...] = FULL) -> Played:
        started.append(Played(monkeypatch, attentions))
        started[-1].start(facts)
        return started[-1]

    yield start
    for played in started:
        played.stop()


@pytest.fixture
def played(start_played) -> Played:
    found = start_played()
    found.connect()
    return found
