"""Clients that ask without pause, and what they got: every answer is held against the only right one."""

from __future__ import annotations

import http.client
import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.questions import MODEL, Question
from tests.support.streaming_client import Stream

PATIENCE_S = 180.0
_POLL_S = 0.02
_SHARE_THAT_LEAVES = 0.06


@dataclass(slots=True)
class Answer:
    """The answer that one client got. Times are of the monotonic clock; ``times`` has one per token."""

    client_id: str
    started_at: float
    ended_at: float
    token_ids: list[int]
    expected: tuple[int, ...]
    times: list[float]
    has_left: bool = False  # the client went away on purpose
    error: str = ""  # code and message, or how the connection broke
    num_refused: int = 0  # 503 answers that were followed, after their Retry-After, by this one
    transfer: dict[str, Any] = field(default_factory=dict)

    @property
    def is_wrong(self) -> bool:
        """True if a token is not what it must be, or a whole answer is too short or too long."""
        if list(self.expected[: len(self.token_ids)]) != self.token_ids:
            return True
        return not self.error and not self.has_left and len(self.token_ids) != len(self.expected)


class Load:
    """``num_clients`` clients, each with one stream at a time. ``retries_refusals``: a 503 is followed once, as it says."""

    def __init__(
        self, base_url: str, questions: Sequence[Question], seed: int, num_clients: int, *, retries_refusals: bool
    ) -> None:
        self.answers: list[Answer] = []
        self._base_url = base_url
        self._questions = questions
        self._retries_refusals = retries_refusals
        self._stop = threading.Event()
        self._ids = itertools.count(1)
        self._rngs = [random.Random(f"{seed}:{number}") for number in range(num_clients)]
        self._threads = [threading.Thread(target=self._run, args=(rng,), name="client") for rng in self._rngs]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask nothing more, and wait for the answers that are due."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            self.answers.append(self._ask(rng))

    def _ask(self, rng: random.Random) -> Answer:
        question = rng.choice(self._questions)
        expected = question.answer[: rng.choice((4, 8, 16, len(question.answer)))]
        client_id = f"chaos-{next(self._ids)}"
        body = {
            "model": MODEL,
            "prompt": list(question.prompt),
            "max_tokens": len(expected),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            # Half of the prompts miss every cache, so their KV needs a handoff.
            "cache_salt": client_id if rng.random() < 0.5 else "shared",
        }
        leaves_after = rng.randrange(len(expected)) if rng.random() < _SHARE_THAT_LEAVES else None
        answer = Answer(client_id, time.monotonic(), 0.0, [], expected, [])
        retry_after = self._stream(body, answer, leaves_after)
        if retry_after is not None and self._retries_refusals:
            time.sleep(retry_after)
            answer = Answer(client_id, time.monotonic(), 0.0, [], expected, [], num_refused=1)
            self._stream(body, answer, leaves_after)
        return answer

    def _stream(self, body: dict[str, Any], answer: Answer, leaves_after: int | None) -> float | None:
        """Take one stream to its end; returns the Retry-After of a refusal."""
        try:
            stream = Stream(self._base_url, body)
        except OSError as error:
            answer.error, answer.ended_at = f"connect: {error!r}", time.monotonic()
            return None
        while not stream.has_ended and time.monotonic() < stream.started_at + PATIENCE_S:
            if leaves_after is not None and len(stream.token_ids) > leaves_after:
                answer.has_left = True
                stream.leave()
                break
            time.sleep(_POLL_S)
        answer.token_ids, answer.times, answer.transfer = list(stream.token_ids), list(stream.times), dict(stream.transfer)
        answer.ended_at = stream.ended_at or time.monotonic()
        if answer.has_left:
            return None
        if not stream.has_ended:
            answer.error = f"no end within {PATIENCE_S:g} s"
            stream.leave()
        elif stream.error is not None:
            answer.error = f"{stream.status} {stream.error.get('code')}: {stream.error.get('message')}"
        elif stream.broken or not stream.is_done:
            answer.error = f"broken: {stream.broken}"
        if stream.status == http.client.SERVICE_UNAVAILABLE:
            return float(stream.headers.get("retry-after", "nan"))
        return None
