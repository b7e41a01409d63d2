"""Queues of requests that wait for admission: first come first served, or by priority.

Own the order and nothing else: no status, no blocks, no budget. Only ``core.sched`` touches them. ``core.sched.fair_queue`` has
one of them for each tenant.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

from core.request import Request

SchedulingPolicy = Literal["fcfs", "priority"]
PriorityKey = tuple[int, float, str]


def priority_key(request: Request) -> PriorityKey:
    """Return the key of the order of requests: the smallest is served first and preempted last."""
    return request.priority, request.arrival_time + request.patience_s, request.request_id


class RequestQueue(ABC):
    """Requests in the order in which they will be admitted. Iteration follows that order and changes nothing."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a request after the earlier ones."""

    @abstractmethod
    def pop_request(self) -> Request:
        """Remove and return the next request. Raises: IndexError if there is none."""

    @abstractmethod
    def prepend_request(self, request: Request) -> None:
        """Return a popped request to the queue, to be the next one if the policy allows it."""

    @abstractmethod
    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Prepend one after the other, so that the *last* one given comes first."""

    def requeue_request(self, request: Request) -> None:
        """Queue an admitted request that has lost its blocks again, to be the next one if the policy allows it."""
        self.prepend_request(request)

    @abstractmethod
    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove these requests; those not queued are ignored. One pass for all of them."""

    @abstractmethod
    def first_request(self) -> Request:
        """Return the next request without removing it. Raises: IndexError if there is none."""

    def refund_cached(self, request: Request, num_tokens: int) -> None:
        """Record that an admitted request did not have to compute these tokens. Only fair queues count them."""

    def charge_output(self, request: Request) -> None:
        """Record the end of a request. Only fair queues count its output."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue(RequestQueue):
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add_request(self, request: Request) -> None:
        """Append."""
        self._requests.append(request)

    def pop_request(self) -> Request:
        """Remove and return the oldest."""
        return self._requests.popleft()

    def prepend_request(self, request: Request) -> None:
        """Make it the next one."""
        self._requests.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put them in front in reverse order."""
        self._requests.extendleft(requests)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Keep all other requests, in order."""
        removed = set(requests)
        if removed:
            self._requests = deque(request for request in self._requests if request not in removed)

    def first_request(self) -> Request:
        """Return the oldest."""
        return self._requests[0]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue(RequestQueue):
    """Smallest (priority, arrival time plus patience, request id) first. Prepending only inserts: the key alone decides."""

    def __init__(self) -> None:
        self._heap: list[tuple[PriorityKey, Request]] = []

    def add_request(self, request: Request) -> None:
        """Insert the request by its key."""
        heapq.heappush(self._heap, (priority_key(request), request))

    def pop_request(self) -> Request:
        """Remove and return the most urgent."""
        return heapq.heappop(self._heap)[1]

    def prepend_request(self, request: Request) -> None:
        """Insert the request by its key."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Insert each request by its key."""
        for request in requests:
            self.add_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Rebuild the heap without them."""
        removed = set(requests)
        if removed:
            self._heap = [entry for entry in self._heap if entry[1] not in removed]
            heapq.heapify(self._heap)

    def first_request(self) -> Request:
        """Return the most urgent."""
        return self._heap[0][1]

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap, key=lambda entry: entry[0]))


def create_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """Return an empty queue of this policy."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
