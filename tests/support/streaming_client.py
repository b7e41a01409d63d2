"""A client of the OpenAI API that sees single tokens and their times, and that may leave at any moment. For tests.

Speaks plain HTTP by a thread of its own; knows the fields of a streamed completion and nothing of the cluster behind.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit


class Stream:
    """One streamed completion, read by a thread of its own, with the time of every token.

    ``body`` is the request's; the prompt of a completion is a list of token ids.
    """

    def __init__(self, base_url: str, body: Mapping[str, Any], path: str = "/v1/completions") -> None:
        self.prompt: Sequence[int] = body.get("prompt", ())
        self._path = path
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}  # of the response, names in lower case
        self.error: dict[str, Any] | None = None  # the server's error
        self.broken = ""  # how the connection ended, if not in good order
        self.usage: dict[str, Any] = {}
        self.token_ids: list[int] = []
        self.times: list[float] = []  # of the tokens, by the monotonic clock
        self.finish_reason = ""
        self.is_done = False
        self.started_at = time.monotonic()
        self.ended_at = 0.0
        self._has_ended = threading.Event()
        self._connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=240)
        self._connection.connect()
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._run, args=(json.dumps(body),), daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True once nothing more comes, for any reason."""
        return self._has_ended.is_set()

    @property
    def transfer(self) -> dict[str, Any]:
        """The answer's report about its handoff."""
        found: dict[str, Any] = self.usage.get("kv_transfer", {})
        return found

    def leave(self) -> float:
        """Disconnect, as a client does that has lost interest; returns when."""
        at = time.monotonic()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        return at

    def result(self, timeout_s: float = 120.0) -> Stream:
        """Wait for the end."""
        assert self._has_ended.wait(timeout_s), f"no answer within {timeout_s:g} s; {len(self.token_ids)} tokens so far"
        return self

    def _run(self, body: str) -> None:
        try:
            self._connection.request("POST", self._path, body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            self.status = response.status
            self.headers = {name.lower(): value for name, value in response.getheaders()}
            if response.status != http.client.OK:
                self.error = json.loads(response.read())["error"]
                return
            for line in response:
                if line.startswith(b"data: "):
                    self._take(line.removeprefix(b"data: ").strip())
            if not self.is_done and self.error is None:
                self.broken = "the stream ended early"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.broken = repr(error)
        finally:
            self._connection.close()
            self.ended_at = time.monotonic()
            self._has_ended.set()

    def _take(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self.is_done = True
            return
        chunk = json.loads(payload)
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            self.token_ids += choice.get("token_ids") or ()
            self.times += [time.monotonic()] * len(choice.get("token_ids") or ())
            self.finish_reason = choice["finish_reason"] or self.finish_reason
