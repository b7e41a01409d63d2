"""What surrounds a worker's process in its tests: an engine, a connector and a router that follow a script."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import zmq
import zmq.asyncio

from core.engine.step_watch import StepSize
from core.request import EngineCoreOutput, PrefillStats
from core.sched.stats import EngineStats
from core.wire.codec import decode_worker_frame, encode_router_message
from core.wire.messages import Heartbeat, Register, Registered

WAIT_S = 20.0


class ScriptedEngine:
    """Counts up, one token per step and request, or 5,000 for a prompt that starts with 9.

    A prompt that starts with 666 ends the engine, one with 7 never ends.
    """

    def __init__(self, journal, gate=None):
        self.journal = journal
        self.gate = gate  # what every step waits for
        self.requests = {}
        self.stats = EngineStats(num_external_queried_tokens=44, num_external_hit_tokens=32)
        self.step_size = StepSize(num_tokens=1, num_requests=1)

    def add_request(self, new):
        self.requests[new.request_id] = [new, 0]

    def abort_requests(self, request_ids):
        self.journal += [f"abort {request_id}" for request_id in request_ids]
        return [request_id for request_id in request_ids if self.requests.pop(request_id, None)]

    def step(self):
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        outputs = []
        for request_id, (new, count) in list(self.requests.items()):
            if new.prompt_token_ids[0] == 666:
                raise ValueError("the engine broke")
            if new.prompt_token_ids[0] == 7:
                continue
            is_last = count + 1 == new.sampling.max_tokens
            stats = PrefillStats(len(new.prompt_token_ids), 0, 0) if count == 0 else None
            token_ids = [count] * (5000 if new.prompt_token_ids[0] == 9 else 1)
            outputs.append(EngineCoreOutput(request_id, token_ids, "length" if is_last else None, prefill_stats=stats))
            self.requests[request_id][1] += 1
            if is_last:
                del self.requests[request_id]
        return outputs

    def has_work(self):
        return any(new.prompt_token_ids[0] != 7 for new, _ in self.requests.values())

    def wake(self):
        pass

    def shutdown(self):
        self.journal.append("engine stopped")


class RecordingConnector:
    """Notes what the shell asks of a connector."""

    transports = ("shm",)
    host_id = "here"
    has_digests = True
    prefix_address = ""
    control_address = "tcp://10.0.0.1:5600"
    meets_producers = True

    def __init__(self, journal):
        self.journal = journal
        self.worker = SimpleNamespace(set_wakeup=lambda wakeup: journal.append("wakeup set"))

    async def start(self):
        self.journal.append("connector started")

    async def stop(self):
        self.journal.append("connector stopped")

    def meet(self, producer):
        self.journal.append(f"meet {producer.engine_id}")

    def expect(self, handoff):
        self.journal.append(f"expect {handoff.transfer_id}")

    def release(self, transfer_ids):
        self.journal.append(f"release {transfer_ids}")

    def renew(self, transfer_ids):
        self.journal.append(f"renew {transfer_ids}")

    def num_leased_blocks(self):
        return 0

    def num_saving_blocks(self):
        return 0

    def longest_lease_s(self):
        return 0.0


class ScriptedRouter:
    """A router's socket; ``expect`` returns the next message of a type and answers membership on the way."""

    def __init__(self, context):
        self.context = context
        self.address = "tcp://127.0.0.1:0"
        self.router_id = "R"
        self.peer = b""
        self.open()

    def open(self):
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        deadline = time.monotonic() + WAIT_S
        while True:  # a socket that was closed a moment ago may still hold the port
            try:
                self.socket.bind(self.address)
                break
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self.address = self.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    async def expect(self, kind):
        async with asyncio.timeout(WAIT_S):
            while True:
                self.peer, frame = await self.socket.recv_multipart()
                message = decode_worker_frame(frame)
                if isinstance(message, Register | Heartbeat):
                    await self.send(Registered(router_id=self.router_id, heartbeat_interval_ms=50, heartbeat_timeout_ms=3000))
                if isinstance(message, kind):
                    return message

    async def send(self, message):
        frame = message if isinstance(message, bytes) else encode_router_message(message)
        await self.socket.send_multipart([self.peer, frame])
