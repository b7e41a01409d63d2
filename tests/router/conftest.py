"""A router on free ports, a tiny byte-level tokenizer, and scripted workers that speak the real wire protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import zmq.asyncio

from core.clock import Clock
from core.config_router import RouterSection
from core.errors import VersionMismatch
from core.model.hub import ModelFiles
from core.model.tokenizer import Tokenizer
from core.wire import codec
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.kv import GroupBlocks, KVHandoff, KVLayoutInfo
from core.wire.media import ECSeal, ECSource, MMFeature
from core.wire.messages import (
    Abort,
    EncodeDone,
    EncodeFailed,
    EncodeRequest,
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    PrefillChoice,
    PrefillDone,
    Register,
    Registered,
    RegisterEncoder,
    RequestFailed,
    RouterMessage,
    TokenLogprobs,
    Tokens,
    TransferUsage,
    Usage,
    WorkerMessage,
)
from core.wire.sockets import SocketOptions, dealer_socket
from router.http.server import Router
from router.openai.served_model import NEUTRAL_SAMPLING, SamplingDefaults, ServedModel

MODEL = "tiny"
EOS = 256
DEADLINE_S = 10.0
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)

_incarnations = itertools.count(1)


def tiny_files(folder: Path, *more_tokens: str) -> ModelFiles:
    """Write a byte-level tokenizer: one token per byte, then <eos>, then special tokens of a test."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    probe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    probe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    probe.decoder = tokenizers.decoders.ByteLevel()
    probe.add_special_tokens(["<eos>", *more_tokens])
    path = folder / "tokenizer.json"
    probe.save(str(path))
    return ModelFiles(
        name=MODEL,
        path=folder,
        config={"eos_token_id": EOS},
        generation_config={},
        weight_files=(),
        tokenizer_file=path,
        tokenizer_config={"eos_token": "<eos>"},
        chat_template=CHAT_TEMPLATE,
        digest_record=folder / "digests.json",
    )


@pytest.fixture(scope="session")
def write_tiny_files() -> Callable[..., ModelFiles]:
    return tiny_files


@pytest.fixture(scope="session")
def tiny_model_files(tmp_path_factory) -> ModelFiles:
    return tiny_files(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_files) -> Tokenizer:
    return Tokenizer(tiny_model_files)


def ec_source(feature: MMFeature) -> ECSource:
    seal = ECSeal(identifier=feature.identifier, num_embeds=feature.num_embeds, hidden_size=4, dtype="float32", digest=7)
    return ECSource(seal=seal, connector="shared", engine_id="e0", incarnation=1, lease_ms=1000)


@dataclass
class Script:
    """The answer of a scripted worker: ``text``, cut after ``max_tokens``, then end of sequence.

    ``pause_after`` tokens of a choice it waits for ``resume``. ``is_silent``: it never answers a Generate. ``error`` is sent
    instead of the first answer. ``cost`` is what a decode worker says of its load; None = all went well.
    """

    text: str = "hello world"
    pause_after: int | None = None
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    is_silent: bool = False
    error: Any = None
    encoded: EncodeDone | EncodeFailed | None = None  # of an encode worker; None = all images are done
    tokens_per_frame: int = 1
    lease_ms: int = 30_000
    cost: TransferUsage | None = None
    late_cached_tokens: int | None = None  # told with the last tokens instead of the first, as agents of vLLM servers do
    stop_reason: int | None = None  # of an answer that ends itself
    calls: dict[str, Any] = field(default_factory=dict)  # of its engine's API: path -> function of the body to (status, parts)


class FakeWorker:
    """A worker process in miniature: DEALER socket, registration, heartbeats, and a script instead of a model."""

    def __init__(self, context: zmq.asyncio.Context, address: str, role: str, tokenizer: Tokenizer, **facts: Any) -> None:
        self.script: Script = facts.pop("script", None) or Script()
        self.role = role
        self.incarnation: int = facts.pop("incarnation", None) or next(_incarnations)
        self.engine_id: str = facts.pop("engine_id", f"{role}-{self.incarnation}")
        self.received: list[RouterMessage] = []
        self.sends_heartbeats = True
        self._tokenizer = tokenizer
        self._facts = facts
        self._changed = asyncio.Condition()
        self._context = context
        self._address = address
        self._tasks: set[asyncio.Task[None]] = set()
        self.aborted: set[str] = set()

    @property
    def registration(self) -> Register | RegisterEncoder:
        if self.role == "encode":
            return RegisterEncoder(
                engine_id=self.engine_id,
                incarnation=self.incarnation,
                model=MODEL,
                model_fingerprint=b"weights",
                ec_connector="shared",
                max_num_images=8,
            )
        defaults: dict[str, Any] = {
            "model": MODEL,
            "model_fingerprint": b"weights",
            "layout": LAYOUT,
            "max_model_len": 512,
            "max_num_seqs": 8,
            "num_blocks": 64,
            "connector": "p2p",
            "transports": ("tcp",),
            "has_digests": True,
        }
        return Register(engine_id=self.engine_id, incarnation=self.incarnation, role=self.role, **{**defaults, **self._facts})

    async def start(self) -> FakeWorker:
        self.connect()
        self._spawn(self._heartbeats())
        await self.send(self.registration)
        await self.wait_for(lambda message: isinstance(message, Registered))
        return self

    def connect(self) -> None:
        self._socket = dealer_socket(self._context, SocketOptions(max_message_bytes=codec.MAX_ROUTER_FRAME_BYTES))
        self._socket.setsockopt(zmq.IMMEDIATE, 0)
        self._socket.connect(self._address)
        self._spawn(self._receive(self._socket))

    def disconnect(self) -> None:
        self._socket.close(linger=0)

    async def kill(self) -> None:
        """Vanish without a word."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(linger=0)

    async def leave(self) -> None:
        await self.send(Goodbye(engine_id=self.engine_id, incarnation=self.incarnation))

    async def send(self, message: WorkerMessage | list[Tokens]) -> None:
        encode = codec.encode_tokens if isinstance(message, list) else codec.encode_worker_message
        await self._socket.send(encode(message))

    async def send_raw(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def wait_for(self, wanted: Callable[[RouterMessage], bool]) -> RouterMessage:
        """Return the first received message that is wanted, waiting for it if it has not come yet."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            while True:
                for message in self.received:
                    if wanted(message):
                        return message
                await self._changed.wait()

    async def generated(self) -> Generate:
        found = await self.wait_for(lambda message: isinstance(message, Generate))
        assert isinstance(found, Generate)
        return found

    async def aborts(self, request_id: str) -> None:
        await self.wait_for(lambda message: isinstance(message, Abort) and request_id in message.request_ids)

    def messages(self, kind: type) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]

    # ---- the script --------------------------------------------------------------------------------------------------

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                message = codec.decode_router_frame(await socket.recv())
            except VersionMismatch as refusal:
                message = refusal
            async with self._changed:
                self.received.append(message)
                self._changed.notify_all()
            if isinstance(message, Abort):
                self.aborted |= set(message.request_ids)
            if isinstance(message, Generate | EncodeRequest) and not self.script.is_silent:
                self._spawn(self._answer(message))
            if isinstance(message, EngineCall) and not self.script.is_silent:
                self._spawn(self._answer_call(message))

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.sends_heartbeats:
                await self.send(Heartbeat(engine_id=self.engine_id, incarnation=self.incarnation))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Generate | EncodeRequest) -> None:
        if isinstance(message, EncodeRequest):
            sources = tuple(map(ec_source, message.mm_features))
            await self.send(self.script.encoded or EncodeDone(request_id=message.request_id, ec_sources=sources))
        elif self.script.error is not None:
            await self.send(RequestFailed(request_id=message.request_id, error=self.script.error))
        elif message.handoff:
            await self._prefill(message)
        else:
            await self._decode(message)

    async def _answer_call(self, call: EngineCall) -> None:
        """Answer with the script's parts; an ErrorInfo among them fails the call, None leaves it open."""
        answer = self.script.calls[call.path](json.loads(call.body))
        if isinstance(answer, ErrorInfo):
            await self.send(RequestFailed(request_id=call.request_id, error=answer))
            return
        status, *parts = answer
        for position, part in enumerate(parts):
            if part is None:
                return
            if isinstance(part, ErrorInfo):
                await self.send(RequestFailed(request_id=call.request_id, error=part))
                return
            is_text = isinstance(part, str)
            await self.send(
                EngineReply(
                    request_id=call.request_id,
                    position=position,
                    status=status,
                    content_type="text/event-stream" if is_text else "application/json",
                    body=part.encode() if is_text else json.dumps(part).encode(),
                    is_last=position == len(parts) - 1,
                )
            )

    def planned(self, message: Generate) -> tuple[list[int], str]:
        token_ids = [*self._tokenizer.encode(self.script.text, add_special_tokens=False), EOS]
        cut = token_ids[: message.sampling.max_tokens]
        return cut, "stop" if cut[-1] == EOS else "length"

    def logprobs_of(self, message: Generate, token_id: int) -> TokenLogprobs | None:
        num_top = message.sampling.logprobs
        if num_top is None:
            return None
        others = [token_id, *range(10, 9 + num_top)][:num_top]
        return TokenLogprobs((token_id, *others), (-0.25, *[-0.25 - rank for rank in range(len(others))]), 1)

    async def _prefill(self, message: Generate) -> None:
        tokens, reason = self.planned(message)
        is_over = len(tokens) == 1
        choices = tuple(
            PrefillChoice(
                index=index,
                token_id=tokens[0],
                logprobs=self.logprobs_of(message, tokens[0]),
                finish_reason=reason if is_over else None,
            )
            for index in range(message.n)
        )
        handoff = None if is_over else self.handoff(message)
        await self.send(
            PrefillDone(
                request_id=message.request_id,
                choices=choices,
                kv_handoff=handoff,
                prompt_logprobs=self._prompt_logprobs(message),
                num_cached_tokens=4,
                queue_ms=0.01,
                prefill_ms=0.02,
            )
        )

    def _prompt_logprobs(self, message: Generate) -> Any:
        if message.sampling.prompt_logprobs is None:
            return None
        return (None, *[TokenLogprobs((token, token), (-1.0, -1.0), 1) for token in message.prompt_token_ids[1:]])

    def handoff(self, message: Generate) -> KVHandoff:
        return KVHandoff(
            transfer_id=f"transfer-{message.request_id}",
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            control_address="tcp://127.0.0.1:1",
            model_fingerprint=b"weights",
            layout=LAYOUT,
            groups=(GroupBlocks(group_id=0, block_ids=(1,), generations=(1,), block_hashes=(bytes(16),)),),
            num_tokens=len(message.prompt_token_ids),
            lease_ms=self.script.lease_ms,
        )

    async def _decode(self, message: Generate) -> None:
        tokens, reason = self.planned(message)
        starts = {choice.index: len(choice.output_token_ids) for choice in message.choices} or dict.fromkeys(
            range(message.n), 0
        )
        transfer = self.script.cost or TransferUsage(
            transport="tcp", transferred_tokens=len(message.prompt_token_ids), transferred_bytes=4096
        )
        usage: Usage | None = Usage(
            num_cached_tokens=4 if self.script.late_cached_tokens is None else 0,
            kv_transfer=transfer if message.kv_handoff else self.script.cost,
            prompt_logprobs=None if message.kv_handoff else self._prompt_logprobs(message),
        )
        step = self.script.tokens_per_frame
        for position in range(min(starts.values()), len(tokens), step):
            if self.script.pause_after is not None and position >= self.script.pause_after:
                await self.script.resume.wait()
            if message.request_id in self.aborted:
                return
            new = tuple(tokens[position : position + step])
            end = reason if position + step >= len(tokens) else None
            found = tuple(self.logprobs_of(message, token) for token in new)
            logprobs = None if message.sampling.logprobs is None else found
            stop = self.script.stop_reason if end == "stop" else None
            live = [index for index, start in starts.items() if position >= start]
            if end is not None and self.script.late_cached_tokens is not None:
                usage = Usage(num_cached_tokens=self.script.late_cached_tokens, is_late=True)
            await self.send([Tokens(message.request_id, i, position, new, end, stop, logprobs, usage) for i in live])
            usage = None


@dataclass
class RouterUnderTest:
    """A started router, how to reach it, and how to add workers."""

    router: Router
    tokenizer: Tokenizer
    context: zmq.asyncio.Context
    has_http: bool
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.router.http_address

    async def add(self, role: str, **facts: Any) -> FakeWorker:
        worker = FakeWorker(self.context, self.router.worker_address, role, self.tokenizer, **facts)
        self.workers.append(worker)
        return await worker.start()

    async def reconnect(self, worker: FakeWorker) -> None:
        """Register a member by a new connection; the old one ends after the router has heard of the new one."""
        (member,) = [each for each in self.router.gateway.core.membership.members if each.key.engine_id == worker.engine_id]
        old_peer, old_socket = member.peer, worker._socket
        worker.connect()
        await worker.send(worker.registration)
        await self.until(lambda: member.peer != old_peer)
        old_socket.close(linger=0)

    def find_cut_off(self) -> None:
        """Let the router find that all workers have closed their connections, as they do while it is silent."""
        gateway = self.router.gateway
        for member in gateway.core.membership.members:
            gateway._perform(gateway.core.on_unreachable(member.peer, gateway.now))

    async def unregistered(self, role: str = "decode", **facts: Any) -> FakeWorker:
        """Return a connected worker that has not registered."""
        worker = FakeWorker(self.context, self.router.worker_address, role, self.tokenizer, **facts)
        self.workers.append(worker)
        worker.connect()
        return worker

    def script(self, **settings: Any) -> Script:
        return Script(**settings)

    async def pair(self, **script: Any) -> tuple[FakeWorker, FakeWorker]:
        """Add a prefill and a decode worker with scripts of the same settings."""
        prefill = await self.add("prefill", script=Script(**script))
        return prefill, await self.add("decode", script=Script(**script))

    def client(self) -> httpx.AsyncClient:
        if self.has_http:
            return httpx.AsyncClient(base_url=self.url, timeout=DEADLINE_S, verify=False)
        transport = httpx.ASGITransport(self.router.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://router", timeout=DEADLINE_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll a condition of the router with a deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - any condition of any object
                await asyncio.sleep(0.01)

    @property
    def num_busy(self) -> int:
        """Connections of clients in the midst of a request."""
        clients = self.router.http.clients
        return len(clients) - clients.num_idle

    def metric(self, name: str, **labels: str) -> float:
        value = self.router.endpoints.metrics.registry.get_sample_value(name, labels)
        return -1.0 if value is None else value


@pytest.fixture
async def start_router(tiny_tokenizer) -> AsyncIterator[Callable[..., Any]]:
    started: list[RouterUnderTest] = []

    async def start(
        *,
        has_http: bool = True,
        sampling: SamplingDefaults = NEUTRAL_SAMPLING,
        model: ServedModel | None = None,
        clock: Clock | None = None,
        **settings: Any,
    ) -> RouterUnderTest:
        defaults = {
            "port": 0,
            "worker_address": "tcp://127.0.0.1:0",
            "heartbeat_interval_s": 0.1,
            "heartbeat_timeout_s": 5.0,
            "request_timeout_s": 20.0,
        }
        model = model or ServedModel(name=MODEL, tokenizer=tiny_tokenizer, defaults=sampling)
        router = Router(RouterSection(**{**defaults, **settings}), model, clock=clock)
        await (router.start() if has_http else router.gateway.start())
        started.append(RouterUnderTest(router, tiny_tokenizer, zmq.asyncio.Context(), has_http))
        return started[-1]

    yield start
    for under_test in started:
        for worker in under_test.workers:
            await worker.kill()
        await under_test.router.stop()
        under_test.context.destroy(linger=0)


@pytest.fixture
async def served(start_router) -> RouterUnderTest:
    """A router without an HTTP socket, with one prefill and one decode worker that answer "hello world"."""
    under_test = await start_router(has_http=False)
    await under_test.pair()
    return under_test


@pytest.fixture
def sse_events() -> Callable[[str], list[Any]]:
    """Return a parser of a whole event stream; the end mark stays a string."""

    def parse(text: str) -> list[Any]:
        assert text.endswith("\n\n")
        frames = text[:-2].split("\n\n")
        assert all(frame.startswith("data: ") for frame in frames)
        return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]

    return parse
