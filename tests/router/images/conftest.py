"""A web server on loopback that has images, or something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest


class Host:
    """Answers each path by what ``pages`` holds for it: the whole response, or None for none at all."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | None] = {}
        self.requests: list[str] = []
        self.asked = asyncio.Event()
        self.num_open = 0
        self.most_open = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __aenter__(self) -> Host:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *error) -> None:
        self.gate.set()
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head)
        self.asked.set()
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await self.gate.wait()
        page = self.pages.get(head.split()[1], b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        if page is None:
            await reader.read()  # until the other side has enough
        else:
            writer.write(page)
        self.num_open -= 1
        writer.close()

    def has(self, path: str, body: bytes) -> None:
        """Answer a path well."""
        self.pages[path] = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host() as found:
        yield found
