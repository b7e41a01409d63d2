"""Fair shares between tenants: each has a queue of its own, and the tenant that has had the least service is next.

Start-time fair queueing (Goyal et al., 1996) with tokens as the unit of service, as in the virtual token counter (Sheng et al.,
OSDI 2024). Each tenant has a *tag*, the tokens that it has been served. When it begins to wait, a tag below the smallest one of
those that wait already is raised to it, so idle time earns no credit; a higher one stays. With policy ``priority`` the smallest
``priority`` comes first, whoever sends it, and tags decide between equal ones.

    A sends 4 prompts of 100 tokens, then B sends 2         tag of A: 0 100 200 300, of B: 0 100
    served                                                   A B A B A A

A worker is never idle while a tenant waits, and no tenant waits for more than its own prompts and as much of each other's. With
one tenant the order is that of the policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from core.request import Request
from core.sched.queue import RequestQueue, SchedulingPolicy, create_request_queue

OUTPUT_WEIGHT = 2.0  # of a generated token against one of a prompt, as in the virtual token counter
_MAX_TAGS = 1024  # of tenants that do not wait now

_Order = tuple[int, float, float, int]


class FairRequestQueue(RequestQueue):
    """Waiting requests of any number of tenants. Tags move when a request is popped, and back when it is prepended.

    A tenant whose requests were all popped still waits until they are admitted: one that is prepended instead finds the tag
    that it left. A requeued one does not, because its tenant may have been idle in between.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._is_by_priority = policy == "priority"
        self._queues: dict[int, RequestQueue] = {}  # of the tenants that wait
        self._tags: dict[int, float] = {}
        self._virtual = 0.0  # the tag at which the last request was served
        self._starts: dict[int, int] = {}  # of the tenants that wait: which was the first of equal ones to begin
        self._num_starts = 0
        # Heaps of the tenants that wait, by order and by tag. An entry holds while it has the tenant's last number.
        self._by_order: list[tuple[_Order, int, int]] = []
        self._by_tag: list[tuple[float, int, int]] = []
        self._numbers: dict[int, int] = {}
        self._num_changes = 0

    def add_request(self, request: Request) -> None:
        """Queue a request after the earlier ones of its tenant."""
        self._queue_of(request.tenant).add_request(request)
        self._forget_old_tags()
        self._note_change(request.tenant)

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
            self._drop_queue(tenant)
        self._note_change(tenant)
        return request

    def prepend_request(self, request: Request) -> None:
        """Return a popped request to the head of its tenant's queue; the tag is what it was before the pop.

        No request may have been added in between.
        """
        self._return(request, self._tags[request.tenant])

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Prepend one after the other."""
        for request in requests:
            self.prepend_request(request)

    def requeue_request(self, request: Request) -> None:
        """Queue an admitted request again at the head of its tenant's queue, and take back its charge."""
        self._queue_of(request.tenant)
        self._return(request, self._tags[request.tenant])

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
                    self._drop_queue(tenant)
                self._note_change(tenant)

    def first_request(self) -> Request:
        """Return the next request."""
        return self._queues[self._next_tenant()].first_request()

    def refund_cached(self, request: Request, num_tokens: int) -> None:
        """Take back the charge for tokens of an admitted request that were in a cache."""
        num_tokens = min(num_tokens, request.num_charged_tokens)
        request.num_charged_tokens -= num_tokens
        self._charge(request.tenant, -num_tokens)

    def charge_output(self, request: Request) -> None:
        """Charge the output of an ended request that was generated here; what it came with was charged like its prompt."""
        self._charge(request.tenant, OUTPUT_WEIGHT * (request.num_output_tokens - request.num_received_output_tokens))

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order in which they would be popped."""
        waiting = {tenant: list(queue)[::-1] for tenant, queue in self._queues.items()}
        tags = {tenant: self._tags[tenant] for tenant in waiting}
        while waiting:
            tenant = min(waiting, key=lambda name: self._order(name, waiting[name][-1], tags[name]))
            request = waiting[tenant].pop()
            tags[tenant] += request.num_tokens
            if not waiting[tenant]:
                del waiting[tenant]
            yield request

    def _return(self, request: Request, tag: float) -> None:
        queue = self._queue_of(request.tenant)
        self._tags[request.tenant] = tag - request.num_charged_tokens
        request.num_charged_tokens = 0
        queue.prepend_request(request)
        self._note_change(request.tenant)

    def _next_tenant(self) -> int:
        while self._numbers.get(self._by_order[0][2]) != self._by_order[0][1]:
            heapq.heappop(self._by_order)
        return self._by_order[0][2]

    def _least_tag(self) -> float:
        """Return the smallest tag of the tenants that wait, or that of the last request if none does."""
        while self._by_tag and self._numbers.get(self._by_tag[0][2]) != self._by_tag[0][1]:
            heapq.heappop(self._by_tag)
        return self._by_tag[0][0] if self._by_tag else self._virtual

    def _note_change(self, tenant: int) -> None:
        """Order a tenant anew, whose tag or first request may have changed."""
        queue = self._queues.get(tenant)
        if queue is None:
            return
        self._num_changes += 1
        self._numbers[tenant] = self._num_changes
        order = self._order(tenant, queue.first_request(), self._tags[tenant])
        heapq.heappush(self._by_order, (order, self._num_changes, tenant))
        heapq.heappush(self._by_tag, (self._tags[tenant], self._num_changes, tenant))
        if len(self._by_order) + len(self._by_tag) > _MAX_TAGS + 8 * len(self._queues):
            self._by_order = [entry for entry in self._by_order if self._numbers.get(entry[2]) == entry[1]]
            self._by_tag = [entry for entry in self._by_tag if self._numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._by_order)
            heapq.heapify(self._by_tag)

    def _drop_queue(self, tenant: int) -> None:
        del self._queues[tenant], self._starts[tenant], self._numbers[tenant]

    def _order(self, tenant: int, first: Request, tag: float) -> _Order:
        """Return the key by which the first requests of two tenants compare.

        With the policy ``priority``: by priority, then by the tag *after* the service, so that short prompts come before long
        ones. Else by the tag before it.
        """
        if self._is_by_priority:
            return first.priority, tag + first.num_tokens, first.arrival_time, self._starts[tenant]
        return 0, tag, first.arrival_time, self._starts[tenant]

    def _queue_of(self, tenant: int) -> RequestQueue:
        queue = self._queues.get(tenant)
        if queue is None:
            least = self._least_tag()
            self._tags[tenant] = max(self._tags.pop(tenant, least), least)
            self._num_starts += 1
            self._starts[tenant] = self._num_starts
            self._numbers[tenant] = 0
            queue = self._queues[tenant] = create_request_queue(self._policy)
        return queue

    def _charge(self, tenant: int, num_tokens: float) -> None:
        self._tags[tenant] = self._tags.get(tenant, self._virtual) + num_tokens
        self._note_change(tenant)

    def _forget_old_tags(self) -> None:
        """Forget tags that the tenants would not keep if they came back, and the oldest of too many."""
        if len(self._tags) <= _MAX_TAGS + len(self._queues):
            return
        least = self._least_tag()
        idle = [tenant for tenant in self._tags if tenant not in self._queues]
        for tenant in [name for name in idle if self._tags[name] <= least] or idle[: len(idle) // 2]:
            del self._tags[tenant]
