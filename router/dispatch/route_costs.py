"""What each worker would cost for a prompt: the predicted time of ``router.routing``, from this router's own messages.

Owns, for every worker, the backlog of prompts without a first token, and how true its predicted hits were; for every pool of
equal workers, the fitted prefill time. Callers pass the time in seconds; predictions are in ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.wire.media import MMFeature
from core.wire.messages import Abort, Generate, PrefillDone, RouterMessage, Tokens
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.timing import RoutingReport
from router.routing.accuracy import HitAccuracy
from router.routing.backlog import Backlog, QueuedPrompt
from router.routing.cost import PrefillTime, patience_ms, score
from router.routing.fit import PrefillFit
from router.routing.placed import PlacedPrefixes, PrefixIndex

_LONGEST_PATIENCE_MS = 60_000.0

_Pool = tuple[bytes, str]  # model fingerprint and role


@dataclass(frozen=True, slots=True)
class Offer:
    """What one worker would cost: predicted hit in tokens, wait and own time in ms, and the score that decides.

    ``patience_ms`` is how long shorter prompts that come later may be computed first; 0 if it serves in order of arrival.
    """

    hit_tokens: int
    patience_ms: float
    wait_ms: float
    own_ms: float
    score: float

    @property
    def ttft_ms(self) -> float:
        """The predicted time from placement to the first token."""
        return self.wait_ms + self.own_ms


@dataclass(slots=True)
class _Worker:
    pool: _Pool
    backlog: Backlog = field(default_factory=Backlog)
    accuracy: HitAccuracy = field(default_factory=HitAccuracy)


@dataclass(frozen=True, slots=True)
class _Placed:
    worker: WorkerKey
    num_tokens: int
    claimed_tokens: int
    alone_since: float | None  # when it was sent, if no other prompt was at the worker


class RouteCosts:
    """The costs of all workers. Without ``is_enabled`` it offers nothing, and routes are chosen by load."""

    def __init__(self, index: PrefixIndex[WorkerKey] | None = None) -> None:
        self._index: PrefixIndex[WorkerKey] = index if index is not None else PlacedPrefixes()
        self.is_enabled = True
        self._workers: dict[WorkerKey, _Worker] = {}
        self._fits: dict[_Pool, PrefillFit] = {}
        self._placed: dict[str, _Placed] = {}  # by wire id
        self.num_predicted_hit_tokens = 0  # of all prompts that were computed
        self.num_real_hit_tokens = 0
        self._last_keys: tuple[Sequence[int], bytes, Sequence[int]] = ((), b"", ())

    # ---- choosing ----------------------------------------------------------------------------------------------------

    def offers(
        self, workers: Iterable[GenerationWorker], prompt: Sequence[int], salt: bytes, now: float
    ) -> dict[WorkerKey, Offer]:
        """Return what every worker that computes prompts would cost; empty if routes are chosen by load."""
        if not self.is_enabled:
            return {}
        hits = self._index.hits(self._keys(prompt, salt))
        return {
            worker.key: self._offer(worker, len(prompt), hits.get(worker.key, 0), now)
            for worker in workers
            if worker.role != "decode" or worker.may_serve_alone
        }

    def prefill_time(self, worker: GenerationWorker) -> PrefillTime:
        """Return the fitted prefill time of a worker's pool; before its first prompt, that of another role with the model."""
        pool = _pool_of(worker)
        own = self._fit(pool)
        others = [fit for (model, _), fit in self._fits.items() if model == pool[0] and fit.num_seen]
        return own.time if own.num_seen or not others else max(others, key=lambda fit: fit.num_seen).time

    def accuracies(self) -> Mapping[WorkerKey, HitAccuracy]:
        """Return the predicted and real hits of every worker."""
        return {key: worker.accuracy for key, worker in self._workers.items()}

    def mean_error(self) -> float:
        """Return the recent mean of |real - predicted| / predicted prefill time of the worst pool; 0 before any prompt."""
        return max((fit.mean_error for fit in self._fits.values()), default=0.0)

    def _offer(self, worker: GenerationWorker, num_tokens: int, claimed: int, now: float) -> Offer:
        known = self._worker(worker)
        time = self.prefill_time(worker)
        hit = known.accuracy.credit(min(claimed, max(0, num_tokens - 1)))
        own_ms = time.ms(num_tokens - hit, hit)
        patience = min(_LONGEST_PATIENCE_MS, patience_ms(own_ms)) if worker.facts.has_patience else 0.0
        wait_ms, num_delayed = known.backlog.place_of(now * 1e3 + patience, now * 1e3)
        return Offer(hit, patience, wait_ms, own_ms, score(wait_ms, own_ms, num_delayed))

    # ---- messages ----------------------------------------------------------------------------------------------------

    def on_sent(self, worker: GenerationWorker, message: RouterMessage, now: float) -> None:
        """Record a message to a worker: a prompt joins its backlog, and an abort removes it."""
        match message:
            case Generate() if self.is_enabled and not message.choices:  # with choices, the prompt was computed before
                keys = self._keys(message.prompt_token_ids, salt_of(message.cache_salt, message.mm_features))
                num_tokens, claimed = len(message.prompt_token_ids), self._index.hits(keys).get(worker.key, 0)
                offer = self._offer(worker, num_tokens, claimed, now)
                prompt = QueuedPrompt(num_tokens - offer.hit_tokens, offer.own_ms, now * 1e3 + offer.patience_ms)
                backlog = self._worker(worker).backlog
                alone_since = None if backlog.prompts else now
                backlog.add(message.request_id, prompt, now * 1e3)
                self._placed[message.request_id] = _Placed(worker.key, num_tokens, claimed, alone_since)
                self._index.on_placed(worker.key, keys, worker.facts.num_blocks * worker.facts.layout.block_size)
            case Abort():
                for request_id in message.request_ids:
                    self.drop(request_id, now)

    def on_prefill_done(self, message: PrefillDone, now: float) -> None:
        """Learn from a computed prompt. Unknown ids are ignored."""
        prefill_ms = 0.0 if message.recomputed_tokens else message.prefill_ms  # 0 = teaches no time
        self._on_computed(message.request_id, message.num_cached_tokens, prefill_ms, now)

    def on_first_token(self, message: Tokens, now: float) -> None:
        """Learn from a prompt whose first token comes from a worker that decodes it too, and so reports no prefill time.

        The time since the prompt was sent counts if it found no other prompt at the worker. It includes the delay by running
        requests, which the next prompt will meet too. Unknown ids and later tokens are ignored.
        """
        placed = self._placed.get(message.request_id)
        if placed is None or message.usage is None:
            self.drop(message.request_id, now)
            return
        elapsed_ms = 0.0 if placed.alone_since is None else (now - placed.alone_since) * 1e3
        self._on_computed(message.request_id, message.usage.num_cached_tokens, elapsed_ms, now)

    def _on_computed(self, request_id: str, num_reported_cached: int, prefill_ms: float, now: float) -> None:
        placed = self._placed.get(request_id)
        self.drop(request_id, now)
        known = self._workers.get(placed.worker) if placed is not None else None
        if placed is None or known is None:
            return
        num_cached = min(num_reported_cached, placed.num_tokens)
        known.accuracy.observe(placed.claimed_tokens, num_cached)
        self.num_predicted_hit_tokens += placed.claimed_tokens
        self.num_real_hit_tokens += num_cached
        self._fit(known.pool).observe(placed.num_tokens - num_cached, num_cached, prefill_ms)

    def drop(self, request_id: str, now: float) -> None:
        """Remove a prompt that is computed or has ended otherwise. Unknown ids are ignored."""
        placed = self._placed.pop(request_id, None)
        if placed is not None and placed.worker in self._workers:
            self._workers[placed.worker].backlog.remove(request_id, now * 1e3)

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        self._workers.pop(worker, None)
        self._index.on_left(worker)
        for request_id in [name for name, placed in self._placed.items() if placed.worker == worker]:
            del self._placed[request_id]

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _worker(self, worker: GenerationWorker) -> _Worker:
        return self._workers.setdefault(worker.key, _Worker(_pool_of(worker)))

    def _fit(self, pool: _Pool) -> PrefillFit:
        return self._fits.setdefault(pool, PrefillFit())

    def _keys(self, prompt: Sequence[int], salt: bytes) -> Sequence[int]:
        """Return the keys of a prompt; those of the last one are kept, since it is placed right after its offers."""
        last_prompt, last_salt, keys = self._last_keys
        if prompt is not last_prompt or salt != last_salt:
            keys = self._index.keys(prompt, salt)
            self._last_keys = prompt, salt, keys
        return keys


def report(chosen: Offer, offers: Iterable[Offer]) -> RoutingReport:
    """Return why one offer was chosen of all."""
    every = list(offers)
    longest = max(offer.hit_tokens for offer in every)
    if any(offer.score < chosen.score for offer in every):
        reason = "availability"
    elif not longest:
        reason = "load"
    else:
        reason = "prefix" if chosen.hit_tokens == longest else "wait"
    return RoutingReport(
        reason=reason,
        candidates=len(every),
        predicted_hit_tokens=chosen.hit_tokens,
        longest_hit_tokens=longest,
        predicted_ttft_ms=chosen.ttft_ms,
    )


def salt_of(cache_salt: str, mm_features: Sequence[MMFeature]) -> bytes:
    """Return what separates equal token ids with different KV: the client's salt and the images."""
    return b"\0".join([cache_salt.encode(), *(feature.identifier for feature in mm_features)])


def _pool_of(worker: GenerationWorker) -> _Pool:
    return worker.facts.model_fingerprint, worker.role
