"""Fair shares between tenants: each has a queue of its own, and the tenant that has had the least service is next.

Start-time fair queueing (Goyal et al., 1996) with tokens as the unit of service, as in the virtual token counter (Sheng et al.,
OSDI 2024). Each tenant has a *tag*, the tokens that it has been served. A tenant that begins to wait takes the smallest tag of
those that wait already, so idle time earns no credit. Smaller ``priority`` comes first, whoever sends it.

    A sends 4 prompts of 100 tokens, then B sends 2         tag of A: 0 100 200 300, of B: 0 100
    served                                                   A B A B A A

A worker is never idle while a tenant waits, and no tenant waits for more than its own prompts and as much of each other's. With
one tenant the order is that of the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.request import Request
from core.sched.queue import RequestQueue, SchedulingPolicy, create_request_queue

OUTPUT_WEIGHT = 2.0  # of a generated token against one of a prompt, as in the virtual token counter
_MAX_TAGS = 1024  # of tenants that do not wait now


class FairRequestQueue(RequestQueue):
    """Waiting requests of any number of tenants. Tags move when a request is popped, and back when it is prepended."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._is_by_priority = policy == "priority"
        self._queues: dict[int, RequestQueue] = {}  # of the tenants that wait
        self._tags: dict[int, float] = {}
        self._virtual = 0.0  # the tag at which the last request was served

    def add_request(self, request: Request) -> None:
        """Queue a request after the earlier ones of its tenant."""
        self._queue_of(request.tenant).add_request(request)

    def pop_request(self) -> Request:
        """Remove and return the next request, and charge it to its tenant."""
        if not self._queues:
            raise IndexError("no request waits")
        tenant = self._next_tenant()
        queue = self._queues[tenant]
        request = queue.pop_request()
        self._virtual = self._tags[tenant]
        request.num_charged_tokens = request.num_tokens
        self._tags[tenant] += request.num_charged_tokens
        if not queue:
            del self._queues[tenant]
            self._forget_old_tags()
        return request

    def prepend_request(self, request: Request) -> None:
        """Return a popped request to the head of its tenant's queue, and take back its charge."""
        queue = self._queue_of(request.tenant)
        self._tags[request.tenant] -= request.num_charged_tokens
        request.num_charged_tokens = 0
        queue.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Prepend one after the other."""
        for request in requests:
            self.prepend_request(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove these requests, in one pass per tenant."""
        by_tenant: dict[int, list[Request]] = {}
        for request in requests:
            by_tenant.setdefault(request.tenant, []).append(request)
        for tenant, removed in by_tenant.items():
            queue = self._queues.get(tenant)
            if queue is not None:
                queue.remove_requests(removed)
                if not queue:
                    del self._queues[tenant]

    def first_request(self) -> Request:
        """Return the next request."""
        return self._queues[self._next_tenant()].first_request()

    def refund_cached(self, request: Request, num_tokens: int) -> None:
        """Take back the charge for tokens of an admitted request that were in a cache."""
        num_tokens = min(num_tokens, request.num_charged_tokens)
        request.num_charged_tokens -= num_tokens
        self._charge(request.tenant, -num_tokens)

    def charge_output(self, request: Request) -> None:
        """Charge the output of an ended request that has run."""
        if request.num_computed_tokens:
            self._charge(request.tenant, OUTPUT_WEIGHT * request.num_output_tokens)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order in which they would be popped."""
        waiting = {tenant: list(queue)[::-1] for tenant, queue in self._queues.items()}
        tags = {tenant: self._tags[tenant] for tenant in waiting}
        while waiting:
            tenant = min(waiting, key=lambda name: self._order(waiting[name][-1], tags[name]))
            request = waiting[tenant].pop()
            tags[tenant] += request.num_tokens
            if not waiting[tenant]:
                del waiting[tenant]
            yield request

    def _next_tenant(self) -> int:
        if len(self._queues) == 1:
            return next(iter(self._queues))
        return min(self._queues, key=lambda tenant: self._order(self._queues[tenant].first_request(), self._tags[tenant]))

    def _order(self, first: Request, tag: float) -> tuple[int, float, float]:
        """Return the key by which the first requests of two tenants compare.

        By priority, and then by the tag after its service instead of before it, so that short prompts come before long ones.
        """
        if self._is_by_priority:
            return first.priority, tag + first.num_tokens, first.arrival_time
        return 0, tag, first.arrival_time

    def _queue_of(self, tenant: int) -> RequestQueue:
        queue = self._queues.get(tenant)
        if queue is None:
            least = min((self._tags[name] for name in self._queues), default=self._virtual)
            self._tags[tenant] = max(self._tags.pop(tenant, least), least)
            queue = self._queues[tenant] = create_request_queue(self._policy)
        return queue

    def _charge(self, tenant: int, num_tokens: float) -> None:
        self._tags[tenant] = self._tags.get(tenant, self._virtual) + num_tokens

    def _forget_old_tags(self) -> None:
        """Forget tags that the tenants would not keep if they came back, and the oldest of too many."""
        if len(self._tags) <= _MAX_TAGS + len(self._queues):
            return
        least = min((self._tags[name] for name in self._queues), default=self._virtual)
        idle = [tenant for tenant in self._tags if tenant not in self._queues]
        for tenant in [name for name in idle if self._tags[name] <= least] or idle[: len(idle) // 2]:
            del self._tags[tenant]
