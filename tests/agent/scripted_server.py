"""A vLLM server as far as an agent sees it, in the event loop of the test: what it answers is the test's."""

from __future__ import annotations

import asyncio
import contextlib
import json

END = "data: [DONE]\n\n"


class ScriptedServer:
    """``answers`` are those to the next requests: (status, JSON), or a list of events, of which None never ends."""

    def __init__(self):
        self.bodies = []  # of requests to generate
        self.headers = []
        self.answers = []
        self.calls = []  # (path, body) of calls of the API
        self.called = {}  # by path: (status, JSON), or a list of events
        self.token_routes = 200
        self.version = "0.32.0"
        self.model = {"id": "m", "root": "org/m"}
        self.max_logprobs = 20
        self.has_plugin = True
        self.has_stats = True  # False: as with --disable-log-stats
        self.cache_info = 'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n'
        self.is_healthy = True
        self.num_looks = 0  # at its health
        self.thawed = asyncio.Event()  # cleared: it answers nothing
        self.thawed.set()
        self.num_open = 0
        self.num_steps = 0
        self.started_at = 0.0  # not told
        self.steps_by_themselves = False  # one between two looks at its metrics
        self.usages = [0.5]  # of the KV cache, at each look at its metrics; the last one stays
        self._server = None
        self._writers = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self.stop()

    def stop(self):
        """Take no more connections, and close those that there are."""
        self._server.close()
        for writer in self._writers:
            writer.close()

    @property
    def url(self):
        host, port = self._server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    async def _serve(self, reader, writer):
        self._writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                _, path, _ = line.decode().split()
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.headers.append(headers)
                await self.thawed.wait()
                await self._answer(path, json.loads(body) if body else {}, reader, writer)
        writer.close()

    async def _answer(self, path, body, reader, writer):
        match path:
            case "/health":
                self.num_looks += 1
                self._whole(writer, 200 if self.is_healthy else 503, {})
            case "/version":
                self._whole(writer, 200, {"version": self.version})
            case "/v1/models":
                self._whole(writer, 200, {"data": [self.model | {"max_model_len": 512}]})
            case "/metrics":
                self.num_steps += self.steps_by_themselves
                usage = self.usages.pop(0) if len(self.usages) > 1 else self.usages[0]
                text = (
                    f"{self.cache_info}"
                    'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
                    'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="waiting_to_start"} 4.0\n'
                    'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 1.0\n'
                    f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\nvllm:kvferry_held_blocks{{engine="0"}} 7.0\n'
                    'vllm:kv_cache_usage_perc{engine="1"} 0.25\n'
                    'vllm:kvferry_loads_total{engine="0"} 3.0\nvllm:kvferry_loads_total{engine="1"} 1.0\n'
                    'vllm:kvferry_bytes_total{engine="0"} 1.5e+10\nvllm:kvferry_verified_blocks_total{engine="0"} 30.0\n'
                    'vllm:kvferry_failures_total{engine="0",reason="digest"} 2.0\n'
                    'vllm:kvferry_refusals_total{engine="0",reason="layout"} 5.0\n'
                    f'vllm:iteration_tokens_total_count{{engine="0"}} {self.num_steps}\n'
                )
                if not self.has_stats:
                    text = "process_resident_memory_bytes 1.0\n"
                if self.started_at:
                    text += f"process_start_time_seconds {self.started_at}\n"
                if not self.has_plugin:
                    text = text.replace("kvferry", "other")
                self._head(writer, 200, "text/plain", len(text))
                writer.write(text.encode())
            case "/inference/v1/abort_requests":
                self._whole(writer, self.token_routes, {})
            case "/inference/v1/generate" if (body["sampling_params"].get("logprobs") or 0) > self.max_logprobs:
                message = f"Requested sample logprobs of N, which is greater than max allowed: {self.max_logprobs}"
                self._whole(writer, 400, {"error": {"message": message, "code": 400}})
            case "/inference/v1/generate":
                self.bodies.append(body)
                await self._generate(self.answers.pop(0), reader, writer)
            case _:
                self.calls.append((path, body))
                await self._generate(self.called.get(path, (404, {})), reader, writer)

    async def _generate(self, answer, reader, writer):
        if isinstance(answer, tuple):
            self._whole(writer, *answer)
            return
        self.num_open += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        try:
            for event in answer:
                if event is None:
                    await reader.read()  # until the agent leaves
                    return
                writer.write(event.encode() if isinstance(event, str) else f"data: {json.dumps(event)}\n\n".encode())
                await writer.drain()
        finally:
            self.num_open -= 1
            writer.close()

    def _whole(self, writer, status, content):
        body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self._head(writer, status, "application/json", len(body))
        writer.write(body)

    def _head(self, writer, status, kind, size):
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {size}\r\n\r\n".encode())
