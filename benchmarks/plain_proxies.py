"""Routers of the kind that is common today, in front of two vLLM servers: they check, count and retry nothing.

    python plain_proxies.py KIND PORT URL URL

``two-calls``: two plain HTTP calls, P's answer passed to D, as llm-d's side-car does for a completion. ``in-turn``: requests go
to the one server and the other in turn.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from litestar import Litestar, Request, Response, get, post
from litestar.response import Stream

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent.vllm_protocol import REMOTE_DECODE
from kvferry.cluster_plan import free_ports

TWO_CALLS, IN_TURN = "two-calls", "in-turn"
START_TIMEOUT_S = 60.0


class PrefillFailed(Exception):
    """P has answered with an error, which is the answer."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__()
        self.answer = answer


def application(kind: str, urls: tuple[str, str]) -> Litestar:
    """Return the proxy in front of both servers; the first is P and the second D, if there are such."""
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
    turns = itertools.cycle(urls)

    async def prefill(body: dict[str, Any]) -> None:
        first = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "min_tokens")}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        answer = await client.post(f"{urls[0]}/v1/completions", json=first)
        if answer.status_code >= 400:
            raise PrefillFailed(answer)
        body["kv_transfer_params"] = answer.json()["kv_transfer_params"]
        if not body["kv_transfer_params"]:
            raise ValueError("P hands nothing off")

    @get("/ready")
    async def ready() -> None:
        """Answer that it serves."""

    @post("/v1/completions", status_code=200)
    async def completions(request: Request) -> Response | Stream:
        """Stream the answer of the server whose turn it is, or of D once P has computed the prompt."""
        body = await request.json()
        if kind == TWO_CALLS:
            try:
                await prefill(body)
            except PrefillFailed as failed:
                return Response(failed.answer.json(), status_code=failed.answer.status_code)
        url = urls[1] if kind == TWO_CALLS else next(turns)

        async def pieces() -> AsyncIterator[bytes]:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for piece in response.aiter_raw():
                    yield piece

        return Stream(pieces(), media_type="text/event-stream" if body.get("stream") else "application/json")

    return Litestar([ready, completions], openapi_config=None, logging_config=None)


@contextmanager
def running(kind: str, first_url: str, second_url: str) -> Iterator[tuple[str, int]]:
    """Yield address and process id of a proxy that serves."""
    (port,) = free_ports(1)
    process = subprocess.Popen([sys.executable, __file__, kind, str(port), first_url, second_url])
    try:
        _wait_for(f"http://127.0.0.1:{port}/ready")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.kill()
        process.wait()


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:  # URLError is one
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=(TWO_CALLS, IN_TURN))
    parser.add_argument("port", type=int)
    parser.add_argument("urls", nargs=2, metavar="URL", help="of P and D, or of two servers that are alike")
    arguments = parser.parse_args()
    app = application(arguments.kind, tuple(arguments.urls))
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
