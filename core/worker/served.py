"""The requests that a worker has in hand: which router each belongs to, its places in the batch, and its deadline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from core.wire.engine_calls import EngineCall
from core.wire.messages import EncodeRequest, Generate
from core.worker.deadlines import Deadlines


@dataclass(slots=True)
class Served:
    """One request of a router, from its message to the last reply."""

    link: str
    arrival_time: float
    num_prompt_tokens: int
    num_choices: int  # that have not ended
    is_call: bool = False  # of the engine's API
    is_release: bool = False  # such a call that only frees blocks
    is_handed_over: bool = False  # after its first token, as by a prefill worker
    has_prompt: bool = False  # its prompt is computed here, from its beginning
    num_output_tokens: int = 0
    first_token_s: float | None = None
    failure: str = ""  # code of the error that was its last reply


class ServedRequests:
    """The requests by their ids. ``num_choices`` counts the places of all of them: choices, or images."""

    def __init__(self) -> None:
        self._requests: dict[str, Served] = {}
        self._deadlines = Deadlines()
        self.num_choices = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._requests))

    def get(self, request_id: str) -> Served | None:
        """Return a request; None if it is unknown or has ended."""
        return self._requests.get(request_id)

    def values(self) -> Iterable[Served]:
        """Return all requests."""
        return self._requests.values()

    def of_link(self, link: str) -> list[str]:
        """Return the ids of a router's requests."""
        return [request_id for request_id, served in self._requests.items() if served.link == link]

    def move(self, link: str, other: str) -> None:
        """Answer a link's requests by another link, which leads to the same router."""
        for request_id in self.of_link(link):
            self._requests[request_id].link = other

    def queued_of_others(self, link: str) -> tuple[int, int]:
        """Return the number of prompts without a first token that other routers than this one have sent, and their tokens."""
        queued = [
            item.num_prompt_tokens
            for item in self.values()
            if item.has_prompt and item.first_token_s is None and item.link != link
        ]
        return len(queued), sum(queued)

    def num_not_of(self, *, is_prefill: bool) -> int:
        """Return how many requests are not those of a prefill worker, or with False how many are."""
        return sum(item.is_handed_over is not is_prefill for item in self.values())

    def begin(self, link: str, message: Generate | EncodeRequest | EngineCall, now: float) -> Served:
        """Add a request that was admitted."""
        served = self._requests[message.request_id] = Served(
            link=link,
            arrival_time=now,
            num_prompt_tokens=len(message.prompt_token_ids) if isinstance(message, Generate) else 0,
            num_choices=num_choices(message),
            is_call=isinstance(message, EngineCall),
            is_release=isinstance(message, EngineCall) and message.is_release,
            is_handed_over=isinstance(message, Generate) and message.handoff,
            has_prompt=isinstance(message, Generate) and message.kv_handoff is None and not message.choices,
        )
        self.num_choices += num_choices(message)
        if message.deadline_ms:
            self._deadlines.add(message.request_id, now + message.deadline_ms / 1e3)
        return served

    def forget(self, request_id: str) -> Served | None:
        """Remove a request; return it, None if it is unknown."""
        served = self._requests.pop(request_id, None)
        if served is not None:
            self.num_choices -= served.num_choices
            self._deadlines.remove(request_id)
        return served

    def free_choices(self, served: Served, count: int) -> None:
        """Free the places of ended choices for other choices, before their request ends."""
        served.num_choices -= count
        self.num_choices -= count

    @property
    def next_deadline(self) -> float | None:
        """The earliest time at which ``pop_due`` may return a request."""
        return self._deadlines.next_time

    def pop_due(self, now: float) -> str | None:
        """Return a request whose time is up, once; None if there is none."""
        return self._deadlines.pop_due(now)


def num_choices(message: Generate | EncodeRequest | EngineCall) -> int:
    """Return the places that a message takes: choices or images; one for a call, none for one that only releases."""
    match message:
        case EncodeRequest():
            return len(message.mm_features)
        case EngineCall():
            return 0 if message.is_release else 1
        case Generate():
            return len(message.choices) or message.n
