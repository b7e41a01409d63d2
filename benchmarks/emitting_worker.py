"""A worker that computes nothing: each step it sends one token for every stream. For ``router_scale.py``.

    python -c "import emitting_worker; emitting_worker.main()" ADDRESS[,ADDRESS...] STEP_MS

A frame holds the tokens of at most ``STREAMS_PER_FRAME`` streams, and the frames of a step are spread over its time: so do
several engines. With several addresses it is a worker of each router and sends each the tokens of its own streams.
A prompt of ``PROMPT_TOKENS`` times ``FIRST_TOKEN_ID`` + n belongs to stream n; stream -1 gets no token. A line on standard
input asks for the times at which each stream's tokens were sent.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from core.ids import RandomIds, new_incarnation
from core.wire import codec
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Abort, Generate, Heartbeat, Register, Tokens
from core.wire.sockets import SocketOptions, dealer_socket

FIRST_TOKEN_ID = 1000
PROMPT_TOKENS = 16
TOKEN_ID = 4662  # whole characters in the usual vocabularies: an event for each token
STREAMS_PER_FRAME = 100


@dataclass(slots=True)
class Stream:
    number: int
    max_tokens: int
    position: int = 0
    sent: list[float] = field(default_factory=list)


class EmittingWorker:
    def __init__(self, address: str, step_s: float) -> None:
        self._step_s = step_s
        self._socket = dealer_socket(zmq.asyncio.Context(), SocketOptions(max_message_bytes=codec.MAX_ROUTER_FRAME_BYTES))
        self._socket.connect(address)
        self._streams: dict[str, Stream] = {}
        self._sent: dict[int, list[float]] = {}
        self._incarnation = new_incarnation(RandomIds())

    def take_times(self) -> dict[int, list[float]]:
        taken, self._sent = self._sent, {}
        return taken

    async def run(self) -> None:
        layout = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4,
                              block_bytes=2048)  # fmt: skip
        registration = Register(
            engine_id="emitter", incarnation=self._incarnation, role="aggregated", model="bench", model_fingerprint=b"bench",
            layout=layout, max_model_len=100_000_000, max_num_seqs=100_000, num_blocks=1 << 24, connector="p2p",
            transports=("tcp",), has_digests=True,
        )  # fmt: skip
        await self._socket.send(codec.encode_worker_message(registration))
        await asyncio.gather(self._receive(), self._beat(), self._step())

    async def _receive(self) -> None:
        while True:
            match codec.decode_router_frame(await self._socket.recv()):
                case Generate() as request:
                    number = request.prompt_token_ids[0] - FIRST_TOKEN_ID
                    if number >= 0:
                        stream = Stream(number, request.sampling.max_tokens)
                        self._streams[request.request_id], self._sent[number] = stream, stream.sent
                case Abort() as abort:
                    for request_id in abort.request_ids:
                        self._streams.pop(request_id, None)

    async def _beat(self) -> None:
        while True:
            heartbeat = Heartbeat(engine_id="emitter", incarnation=self._incarnation, num_running=len(self._streams))
            await self._socket.send(codec.encode_worker_message(heartbeat))
            await asyncio.sleep(0.5)

    async def _step(self) -> None:
        due = time.monotonic()
        while True:
            num_frames = max(1, math.ceil(len(self._streams) / STREAMS_PER_FRAME))
            for turn in range(num_frames):
                due = max(due + self._step_s / num_frames, time.monotonic() - self._step_s)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                frame = self._next_tokens(turn, num_frames)
                if frame:
                    await self._socket.send(codec.encode_tokens(frame))

    def _next_tokens(self, turn: int, num_turns: int) -> list[Tokens]:
        frame, now = [], time.monotonic()
        for request_id, stream in list(self._streams.items()):
            if stream.number % num_turns != turn:
                continue
            is_last = stream.position + 1 >= stream.max_tokens
            frame.append(Tokens(request_id, 0, stream.position, (TOKEN_ID,), "length" if is_last else None))
            stream.position += 1
            stream.sent.append(now)
            if is_last:
                del self._streams[request_id]
        return frame


def answer_questions(workers: Sequence[EmittingWorker]) -> None:
    for _ in sys.stdin:
        times = {number: sent for worker in workers for number, sent in worker.take_times().items()}
        print(json.dumps(times), flush=True)


async def run_all(workers: Sequence[EmittingWorker]) -> None:
    await asyncio.gather(*(worker.run() for worker in workers))


def main() -> None:
    addresses, step_ms = sys.argv[1:]
    workers = [EmittingWorker(address, float(step_ms) / 1e3) for address in addresses.split(",")]
    threading.Thread(target=answer_questions, args=(workers,), daemon=True).start()
    asyncio.run(run_all(workers))
