"""A real Chromium without a window, driven over its DevTools protocol: pages, scripts, keys, and screenshots.

Debian's ``chromium-headless-shell`` (or ``chromium``) provides it. A page reports its errors, so that a test can assert none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import websockets

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
DEADLINE_S = 60.0


def chromium() -> str | None:
    """Return the executable; None without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. ``errors`` are uncaught exceptions, messages of the console, and what the page's policy has blocked."""

    def __init__(self, socket: Any) -> None:
        self.errors: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        async with asyncio.timeout(DEADLINE_S):
            return await self._answers[number]

    async def open(self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Load a page in a window of this size."""
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Poll until an expression is true."""
        async with asyncio.timeout(DEADLINE_S):
            while not await self.evaluate(script):  # noqa: ASYNC110 - any condition of a page
                await asyncio.sleep(0.05)

    async def text(self, element_id: str) -> str:
        """Return the text of an element as it is shown."""
        return str(await self.evaluate(f"document.getElementById({json.dumps(element_id)}).innerText"))

    async def press(self, key: str) -> None:
        """Press and release a key."""
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9, " ": 32}.get(key, 0)
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    async def accessible_nodes(self) -> list[tuple[str, str]]:
        """Return role and name of everything that assistive technology gets."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        kept = [node for node in nodes if not node.get("ignored")]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in kept]

    async def screenshot(self, path: Path) -> None:
        """Write the whole page as PNG."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        area = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=area)
        await asyncio.to_thread(_write, path, base64.b64decode(answer["data"]))

    async def close(self) -> None:
        """Stop reading its events."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                waiting = self._answers.pop(message["id"])
                if "error" in message:
                    waiting.set_exception(RuntimeError(str(message["error"])))
                else:
                    waiting.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(parameters["args"]))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@asynccontextmanager
async def running_chromium(executable: str, profile: Path) -> AsyncIterator[str]:
    """Start a browser with a profile of its own, and end it; yields the base URL of its protocol."""
    pipe = asyncio.subprocess.DEVNULL
    command = (executable, *FLAGS, f"--user-data-dir={profile}", "about:blank")
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(DEADLINE_S):
            while not port_file.exists() or "\n" not in port_file.read_text():
                assert process.returncode is None, f"{executable} ended with {process.returncode}"
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().split()[0]}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Debian's command is a shell script: the browser is its child
        await process.wait()


@asynccontextmanager
async def new_page(browser: str) -> AsyncIterator[Page]:
    """Open a tab of a running browser, and close it."""
    async with httpx.AsyncClient(timeout=DEADLINE_S) as client:
        target = (await client.put(f"{browser}/json/new?about:blank")).json()
        async with websockets.connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            try:
                yield page
            finally:
                await page.close()
        await client.get(f"{browser}/json/close/{target['id']}")
