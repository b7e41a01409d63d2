"""The kind of router that is common today: two plain HTTP calls, P's answer passed to D. For ``vllm_router.py``.

    python -c "import two_calls_proxy; two_calls_proxy.main()" PORT P_URL D_URL

It does what llm-d's side-car does for a completion, and nothing else: no membership, no retry, no check.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from litestar import Litestar, Request, Response, get, post
from litestar.response import Stream

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def application(p_url: str, d_url: str) -> Litestar:
    """Return the proxy between P and D."""
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    @get("/ready")
    async def ready() -> None:
        """Answer that it serves."""

    @post("/v1/completions", status_code=200)
    async def completions(request: Request) -> Response | Stream:
        """Have P compute the prompt, then stream D's answer."""
        body = await request.json()
        first = {name: value for name, value in body.items() if name not in ("stream", "stream_options", "min_tokens")}
        first |= {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE}
        answer = await client.post(f"{p_url}/v1/completions", json=first)
        if answer.status_code >= 400:
            return Response(answer.json(), status_code=answer.status_code)
        body["kv_transfer_params"] = answer.json()["kv_transfer_params"]

        async def pieces() -> AsyncIterator[bytes]:
            async with client.stream("POST", f"{d_url}/v1/completions", json=body) as response:
                async for piece in response.aiter_raw():
                    yield piece

        return Stream(pieces(), media_type="text/event-stream" if body.get("stream") else "application/json")

    return Litestar([ready, completions], openapi_config=None, logging_config=None)


def main() -> None:
    """Serve on the port and between the servers that the arguments name."""
    port, p_url, d_url = sys.argv[1:]
    uvicorn.run(application(p_url, d_url), host="127.0.0.1", port=int(port), log_level="warning", access_log=False)
