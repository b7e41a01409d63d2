"""What each worker would cost for a prompt: the predicted time of ``router.routing``, from the messages of all workers.

Owns, for every worker, the backlog of prompts without a first token, and how true its claimed hits were; for every kind of
equal workers, the fitted prefill time; and the index of contents (``router.contents``). Callers pass the time in seconds;
predictions are in ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.kv.hashing import ExtraKey
from core.request import extra_keys_of, reads_prefix_cache
from core.wire.contents import ContentReport
from core.wire.kv import KVSource
from core.wire.messages import Abort, Generate, Heartbeat, PrefillDone, RouterMessage, Tokens, TransferUsage
from router.contents.known import Hit, KnownContents
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.offers import WorkerOffer
from router.dispatch.preferences import RouterPreferences
from router.dispatch.sources import PrefixHolder, Sources, holders_of
from router.routing import transfer
from router.routing.accuracy import HitAccuracy
from router.routing.backlog import Backlog, QueuedPrompt
from router.routing.cost import PrefillTime, patience_ms, score
from router.routing.fit import PrefillFit
from router.routing.loads import LoadPrice
from router.routing.local import LocalPrompt, StepTime, finish_ms, pays
from router.routing.offered import OfferedLoad

_LONGEST_PATIENCE_MS = 60_000.0

MOVED = "moved"  # the reason of the abort of a prompt that moves to another worker

_FIRST_CHOICE = "/0"  # after the id of its request

_NO_HIT = Hit()
_NO_PRICE = LoadPrice()

_Kind = tuple[bytes, str]  # model fingerprint and role


@dataclass(slots=True)
class _Worker:
    kind: _Kind
    backlog: Backlog = field(default_factory=Backlog)
    step: StepTime = field(default_factory=StepTime)
    others_until_ms: float = 0.0  # when it would have computed the prompts that other routers had there at its last heartbeat

    accuracy: HitAccuracy = field(default_factory=HitAccuracy)

    @property
    def is_special(self) -> bool:
        """True if it differs from an idle worker of its kind with the same hit."""
        return bool(self.backlog.prompts) or self.others_until_ms > 0 or self.accuracy.is_wrong

    def wait_of_others_ms(self, now_ms: float) -> float:
        """Return how long it still computes prompts of other routers."""
        return max(0.0, self.others_until_ms - now_ms)


@dataclass(frozen=True, slots=True)
class _Placed:
    worker: WorkerKey
    num_tokens: int
    hit: Hit
    num_predicted: int  # tokens that would not be computed, by the pool and the tiers
    alone_since: float | None  # when it was sent, if no other prompt was known to be at the worker
    source: KVSource | None = None  # that it was told of


class RouteCosts:
    """The costs of all workers. Without ``is_enabled`` it offers nothing, and routes are chosen by load."""

    def __init__(self) -> None:
        self.contents = KnownContents()
        self.sources = Sources()
        self.preferences = RouterPreferences()
        self.is_enabled = True
        self.observes_steps = False  # also without local prefills
        self.max_local_itl_ms = 0.0  # of requests beside a prompt that their decode worker computes; 0 = it computes none
        self._workers: dict[WorkerKey, _Worker] = {}
        self._fits: dict[_Kind, PrefillFit] = {}
        self._num_trials: dict[_Kind, int] = {}  # prompts that were sent with a source before the fit is settled
        self._load_prices: dict[tuple[_Kind, str], LoadPrice] = {}  # by connector
        self._placed: dict[str, _Placed] = {}  # by wire id
        self._unjudged: dict[str, _Placed] = {}  # computed by a worker that tells at the end of the answer what it had found
        self._offered: dict[str, OfferedLoad] = {}  # by role
        self.num_predicted_hit_tokens = 0  # of prompts whose workers have told what they found
        self.num_real_hit_tokens = 0

    # ---- choosing ----------------------------------------------------------------------------------------------------

    def offers(
        self,
        workers: Iterable[GenerationWorker],
        prompt: Sequence[int],
        extra_keys: Sequence[ExtraKey] | None,
        now: float,
        members: Sequence[GenerationWorker] = (),
        tenant: int = 0,
    ) -> dict[WorkerKey, WorkerOffer]:
        """Return what each of these workers would cost if it computed the prompt; empty if routes are chosen by load.

        Of ``members`` any may be the source of what the worker lacks. Without ``extra_keys`` the prompt reads no cache: each
        worker computes all of it, whatever it holds.
        """
        if not self.is_enabled:
            return {}
        able = list(workers)
        serving = [member for member in members if member.facts.prefix_address]
        every = {member.key: member for member in (*able, *serving)}.values()
        hits = self.contents.hits(every, prompt, extra_keys) if extra_keys is not None else {}
        holders = holders_of(serving, hits)
        offers: dict[WorkerKey, WorkerOffer] = {}
        alike: dict[tuple[bytes, str, bool, Hit], WorkerOffer] = {}  # of a large cluster most workers are equal for a prompt
        for worker in able:
            key, facts = worker.key, worker.facts
            known, found = self._workers.get(key), hits.get(key, _NO_HIT)
            if holders or (known is not None and known.is_special):
                offers[key] = self._offer(worker, len(prompt), found, now, holders, tenant)
                continue
            traits = (facts.model_fingerprint, facts.role, facts.has_patience, found)
            offer = alike.get(traits)
            if offer is None:
                offer = alike[traits] = self._offer(worker, len(prompt), found, now, tenant=tenant)
            offers[key] = offer
        return offers

    def on_chosen(self, offer: WorkerOffer) -> None:
        """Learn that a prompt goes to the worker of this offer."""
        if offer.declined is not None:
            self.sources.on_declined(offer.declined)

    def source_for(
        self,
        reader: GenerationWorker,
        prompt: Sequence[int],
        extra_keys: Sequence[ExtraKey],
        members: Iterable[GenerationWorker],
    ) -> KVSource | None:
        """Return where a worker that continues a request may load the beginning of its prompt; None if nowhere."""
        if not self.is_enabled or not reader.facts.prefix_address:
            return None
        serving = [member for member in members if member.facts.prefix_address and member.key != reader.key]
        source = self.sources.best(reader, 0, holders_of(serving, self.contents.hits(serving, prompt, extra_keys)))
        return source.as_message(self.prefill_time(reader).ms(source.holder.num_tokens, 0)) if source is not None else None

    def choose_local(
        self, workers: Sequence[GenerationWorker], offers: Mapping[WorkerKey, WorkerOffer], remote: WorkerOffer, now: float
    ) -> GenerationWorker | None:
        """Return the decode worker that should compute the prompt, before ``remote`` would begin; None if none should."""
        prompts: dict[WorkerKey, LocalPrompt] = {}
        for worker in workers:
            offer, known = offers[worker.key], self._worker(worker)
            wait_ms = known.backlog.work_ms(now * 1e3) + known.wait_of_others_ms(now * 1e3)
            next_ms = worker.next_begins_in_s(now) * 1e3
            prompts[worker.key] = LocalPrompt(offer.own_ms, wait_ms, known.step.ms, worker.num_present, next_ms)
        best = min(workers, key=lambda worker: (finish_ms(prompts[worker.key]), worker.load), default=None)
        if best is None or not pays(prompts[best.key], remote.wait_ms, self.max_local_itl_ms):
            return None
        return best

    def prefill_time(self, worker: GenerationWorker) -> PrefillTime:
        """Return the fitted prefill time of a worker's kind; before its first prompt, that of another role with the model."""
        kind = _kind_of(worker)
        own = self._fit(kind)
        others = [fit for (model, _), fit in self._fits.items() if model == kind[0] and fit.num_seen]
        return own.time if own.num_seen or not others else max(others, key=lambda fit: fit.num_seen).time

    def mean_error(self) -> float:
        """Return the recent mean of |real - predicted| / predicted prefill time, of the kind of worker for which it is largest.

        Kinds without a worker and those with too few measured prompts do not count; 0 if there are no others.
        """
        fits = (self._fits.get(kind) for kind in {worker.kind for worker in self._workers.values()})
        return max((fit.mean_error for fit in fits if fit is not None and fit.is_settled), default=0.0)

    # ---- load --------------------------------------------------------------------------------------------------------

    def offered(self, role: str, now: float) -> float:
        """Return how many workers of a role the prompts that this router has sent lately keep busy."""
        load = self._offered.get(role)
        return load.rate(now) if load is not None else 0.0

    def wait_s(self, worker: GenerationWorker, now: float) -> float:
        """Return how many seconds a worker needs for the prompts that it has, those of other routers included."""
        known = self._worker(worker)
        return (known.backlog.work_ms(now * 1e3) + known.wait_of_others_ms(now * 1e3)) / 1e3

    def backlog(self, worker: WorkerKey) -> Backlog:
        """Return the prompts of this router that a worker has yet to compute."""
        known = self._workers.get(worker)
        return known.backlog if known is not None else Backlog()

    def left_s(self, worker: GenerationWorker, request_id: str, now: float, tenant: int, foreseen_s: float) -> float:
        """Return in how many seconds a worker will have computed a prompt of its backlog.

        Those of other routers that it has got since the prompt was placed come later: they delay it no further than
        ``foreseen_s``, in which it was then predicted to be computed.
        """
        known, fair_to = self._worker(worker), tenant if worker.facts.has_fair_shares else None
        own_ms, others_ms = known.backlog.left_ms(request_id, now * 1e3, fair_to), known.wait_of_others_ms(now * 1e3)
        return max(own_ms, min(own_ms + others_ms, foreseen_s * 1e3)) / 1e3

    def num_queued_tokens(self, worker: WorkerKey) -> int:
        """Return how many tokens of this router's prompts a worker has yet to compute."""
        known = self._workers.get(worker)
        return known.backlog.num_new_tokens if known is not None else 0

    def step_ms(self, worker: WorkerKey) -> float:
        """Return the recent time of a worker's step; 0 if it is not known, or not observed."""
        known = self._workers.get(worker)
        return known.step.ms if known is not None else 0.0

    def _offer(
        self,
        worker: GenerationWorker,
        num_tokens: int,
        found: Hit,
        now: float,
        holders: Sequence[PrefixHolder] = (),
        tenant: int = 0,
    ) -> WorkerOffer:
        known = self._worker(worker)
        time = self.prefill_time(worker)
        hit = known.accuracy.credit(min(found.tokens, max(0, num_tokens - 1)))
        own_ms, loaded = self._own_ms(known.kind, time, num_tokens, hit, found)
        alone_ms = own_ms
        transfer_ms, source = 0.0, self.sources.best(worker, hit, holders)
        declined = None
        if source is not None:
            num_held = min(hit + self.sources.trust.credit(source.holder.num_tokens - hit), num_tokens - 1)
            rest_ms = time.ms(num_tokens - num_held, num_held)
            if self._tries_sources(known.kind):
                rest_ms = min(rest_ms, transfer.trial_rest_ms(time.ms(num_tokens, 0), num_tokens, num_tokens - num_held))
            if transfer.pays(source.transfer_ms, own_ms, rest_ms, self.sources.margin):
                transfer_ms, own_ms, loaded = source.transfer_ms, rest_ms, 0
            else:
                source, declined = None, source
        patience = min(_LONGEST_PATIENCE_MS, patience_ms(own_ms)) if worker.facts.has_patience else 0.0
        fair_to = tenant if worker.facts.has_fair_shares else None
        wait_ms, num_delayed = known.backlog.place_of(now * 1e3 + patience, now * 1e3, fair_to)
        wait_ms += known.wait_of_others_ms(now * 1e3)
        cost = score(wait_ms + transfer_ms, own_ms, num_delayed)
        return WorkerOffer(hit + loaded, patience, wait_ms, own_ms + transfer_ms, cost, source, alone_ms, declined)

    def _own_ms(self, kind: _Kind, time: PrefillTime, num_tokens: int, hit: int, found: Hit) -> tuple[float, int]:
        """Return the time to compute a prompt, and how many tokens of it are loaded from the tier that makes it shortest.

        Only after a hit that is believed in full: a tier's blocks follow those in the pool.
        """
        compute_ms = time.ms(num_tokens - hit, hit)
        best = (compute_ms, 0)
        for tier in found.tiers if hit == found.tokens else ():
            loaded = min(tier.tokens, num_tokens - 1 - hit)
            rest_ms = time.ms(num_tokens - hit - loaded, hit + loaded)
            price = self._load_prices.get((kind, tier.connector), _NO_PRICE)
            own_ms = rest_ms + price.ms(loaded, tier.medium, compute_ms - rest_ms)
            best = min(best, (own_ms, loaded))
        return best

    # ---- messages ----------------------------------------------------------------------------------------------------

    def on_sent(self, worker: GenerationWorker, message: RouterMessage, now: float) -> None:
        """Record a message to a worker: a prompt joins its backlog, and an abort removes it."""
        match message:
            case Generate() if self.is_enabled and not message.choices:  # with choices, the prompt was computed before
                self._on_prompt_sent(worker, message, now)
            case Abort():
                for request_id in message.request_ids:
                    self._on_abort_sent(worker, request_id, message.reason, now)

    def _on_prompt_sent(self, worker: GenerationWorker, message: Generate, now: float) -> None:
        token_ids, extra_keys = message.prompt_token_ids, extra_keys_of(message.mm_features, message.cache_salt)
        reads_cache = reads_prefix_cache(message.sampling)
        hits = self.contents.hits([worker], token_ids, extra_keys) if reads_cache else {}
        num_tokens, hit = len(token_ids), hits.get(worker.key, _NO_HIT)
        source = message.kv_source if reads_cache else None
        if source is not None:
            hit = Hit(max(hit.tokens, source.num_tokens), hit.claimed_tokens)
        offer = self._offer(worker, num_tokens, hit, now, tenant=message.tenant)
        due_ms = now * 1e3 + offer.patience_ms
        prompt = QueuedPrompt(num_tokens - offer.hit_tokens, offer.own_ms, due_ms, message.tenant)
        known = self._worker(worker)
        alone_since = None if known.backlog.prompts or known.wait_of_others_ms(now * 1e3) else now
        known.backlog.add(message.request_id, prompt, now * 1e3)
        self._offer_load(worker.role, offer.own_ms, now)
        if source is not None and self._tries_sources(kind := _kind_of(worker)):
            self._num_trials[kind] = self._num_trials.get(kind, 0) + 1
        num_predicted = max(hit.tokens, offer.hit_tokens)
        self._unjudged.pop(message.request_id, None)
        self._placed[message.request_id] = _Placed(worker.key, num_tokens, hit, num_predicted, alone_since, source)
        self.contents.on_placed(message.request_id, worker, token_ids, extra_keys)

    def _on_abort_sent(self, worker: GenerationWorker, request_id: str, reason: str, now: float) -> None:
        placed = self._placed.get(request_id)
        self._unjudged.pop(request_id, None)
        self._unjudged.pop(request_id.removesuffix(_FIRST_CHOICE), None)  # which then has no last token
        if placed is None or placed.worker != worker.key:
            return  # it ends an early pull, not the prompt
        if reason == MOVED and (queued := self.backlog(worker.key).prompts.get(request_id)):
            self._offer_load(worker.role, -queued.predicted_ms, now)  # it counts where it moves
        self.drop(request_id, now)

    def _offer_load(self, role: str, work_ms: float, now: float) -> None:
        self._offered.setdefault(role, OfferedLoad()).add(work_ms / 1e3, now)

    def on_report(self, worker: WorkerKey, report: ContentReport) -> None:
        """Apply what a worker reports of its prefix cache. A snapshot restores the credit that wrong claims have cost it."""
        self.contents.on_report(worker, report)
        known = self._workers.get(worker)
        if report.is_snapshot and known is not None:
            known.accuracy.forgive()
            self._forget_unjudged(worker)  # they were placed by what the snapshot has replaced

    def on_heartbeat(self, worker: GenerationWorker, heartbeat: Heartbeat, now: float) -> bool:
        """Record the work that other routers have there; return True if the worker must report all its contents.

        It must if some reports were lost, or their claims did not hold. Of prompts of others only their number and their
        tokens are known: each counts with the mean length, as if nothing of it were cached. Workers of earlier releases do
        not tell the number: all count as one prompt.
        """
        if not self.is_enabled:
            return False
        self.preferences.on_heartbeat(heartbeat)
        if num_tokens := heartbeat.num_queued_tokens_of_others:
            num_prompts = heartbeat.num_queued_prompts_of_others or 1
            work_ms = num_prompts * self.prefill_time(worker).ms(num_tokens / num_prompts, 0)
            self._worker(worker).others_until_ms = now * 1e3 + work_ms
        elif worker.key in self._workers:
            self._workers[worker.key].others_until_ms = 0.0
        return self.contents.needs_snapshot(worker.key, heartbeat.num_reports)

    def on_step(self, worker: WorkerKey, now: float) -> None:
        """Record the tokens of one engine step."""
        known = self._workers.get(worker)
        if known is not None and (self.max_local_itl_ms or self.observes_steps):
            known.step.observe(now * 1e3)

    def on_prefill_done(self, message: PrefillDone, now: float, *, tells_queue: bool = True) -> None:
        """Learn from a computed prompt. Unknown ids are ignored.

        The time of a worker that does not tell how long the prompt has waited there counts only if it found no other prompt.
        """
        placed = self._placed.get(message.request_id)
        has_time = tells_queue or (placed is not None and placed.alone_since is not None)
        prefill_ms = message.prefill_ms if has_time and not message.recomputed_tokens else 0.0  # 0 = teaches no time
        if load := message.kv_transfer:
            self._learn_load(message.request_id, load)
            self.sources.observe(load)
            self.sources.asking.observe(load.queue_ms)  # other roles report their whole wait there
            prefill_ms = max(0.0, prefill_ms - load.transfer_ms - load.verify_ms)
        self._note_source(message.request_id, message.kv_transfer)
        num_cached = message.num_cached_tokens if message.tells_hits else None
        self._on_computed(message.request_id, num_cached, prefill_ms, now)

    def on_tokens(self, message: Tokens, now: float, *, tells_hits: bool = True) -> None:
        """Learn from a prompt whose first token comes from a worker that decodes it too, and so reports no prefill time.

        The time since the prompt was sent counts if it found no other prompt at the worker, of whatever router, and if the
        first token came before the others. It includes the delay by running requests, which the next prompt will meet too. A
        worker that does not tell its hits with the first token is believed to have had the predicted ones; it is judged by its
        last token, if that tells. Unknown ids and other tokens are ignored.
        """
        if message.usage is None:
            if message.request_id in self._placed:
                self.drop(message.request_id, now)
            return
        load = message.usage.kv_transfer or TransferUsage()
        self.sources.observe(load)
        placed = self._placed.get(message.request_id)
        if placed is not None:
            self._learn_load(message.request_id, load)
            self._note_source(message.request_id, load)
            elapsed_ms = 0.0
            if placed.alone_since is not None and not message.is_whole:
                elapsed_ms = max(0.0, (now - placed.alone_since) * 1e3 - load.transfer_ms)
            num_cached = message.usage.num_cached_tokens if tells_hits else None
            self._on_computed(message.request_id, num_cached, elapsed_ms, now)
            if not tells_hits:
                self._unjudged[message.request_id] = placed
        if not tells_hits and message.finish_reason is not None and message.index == 0:  # the choice that computes the prompt
            unjudged = self._unjudged.pop(message.request_id, None)
            if unjudged is not None and message.usage.is_late:
                self._judge(unjudged, message.usage.num_cached_tokens)

    def _learn_load(self, request_id: str, load: TransferUsage) -> None:
        """Learn what a tier's load took; it is named as its transport."""
        placed = self._placed.get(request_id)
        known = self._workers.get(placed.worker) if placed is not None else None
        if known is not None and load.transport:
            price = self._load_prices.setdefault((known.kind, load.transport), LoadPrice())
            price.observe(load.transferred_tokens, load.transfer_ms)

    def _note_source(self, request_id: str, loaded: TransferUsage | None) -> None:
        """Learn how much of what a source was said to hold could be loaded."""
        placed = self._placed.get(request_id)
        if placed is None or placed.source is None:
            return
        num_loaded = loaded.transferred_tokens if loaded is not None else 0
        self.sources.trust.observe(max(0, placed.source.num_tokens - placed.hit.claimed_tokens), num_loaded)
        if not num_loaded:
            self.sources.on_failed(placed.worker, _key_of(placed.source))

    def _on_computed(self, request_id: str, num_reported_cached: int | None, prefill_ms: float, now: float) -> None:
        placed = self._placed.get(request_id)
        self.contents.on_computed(request_id)
        self._leave_backlog(request_id, now)
        known = self._workers.get(placed.worker) if placed is not None else None
        if placed is None or known is None:
            return
        num_cached = min(placed.num_predicted, placed.num_tokens - 1)
        if num_reported_cached is not None:
            num_cached = self._judge(placed, num_reported_cached)
        self._fit(known.kind).observe(placed.num_tokens - num_cached, num_cached, prefill_ms)

    def _judge(self, placed: _Placed, num_reported_cached: int) -> int:
        """Compare what a worker's contents promised with what it found; return the latter, at most the prompt."""
        num_cached = min(num_reported_cached, placed.num_tokens)
        self.num_predicted_hit_tokens += placed.num_predicted
        self.num_real_hit_tokens += num_cached
        known = self._workers.get(placed.worker)
        if known is not None and known.accuracy.observe(placed.hit.claimed_tokens, num_cached):
            self.contents.distrust(placed.worker)
        return num_cached

    def drop(self, request_id: str, now: float) -> None:
        """Remove a prompt that has ended without being computed, or judged. Unknown ids are ignored."""
        self._unjudged.pop(request_id, None)
        if request_id in self._placed:
            self.contents.drop(request_id)
            self._leave_backlog(request_id, now, is_computed=False)

    def _leave_backlog(self, request_id: str, now: float, *, is_computed: bool = True) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is not None and placed.worker in self._workers:
            self._workers[placed.worker].backlog.remove(request_id, now * 1e3, is_computed=is_computed)

    def join(self, worker: GenerationWorker) -> None:
        """Expect reports of a new member."""
        self._worker(worker)
        self.contents.join(worker)
        self.preferences.join(worker)

    def on_switched(self, worker: GenerationWorker) -> None:
        """Count a worker with those of its new role; its contents and its queue stay."""
        self.preferences.join(worker)
        known = self._workers.get(worker.key)
        if known is not None:
            known.kind = _kind_of(worker)

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        self._workers.pop(worker, None)
        self.sources.forget(worker)
        self.contents.leave(worker)
        self.preferences.forget(worker)
        for request_id in [name for name, placed in self._placed.items() if placed.worker == worker]:
            del self._placed[request_id]
        self._forget_unjudged(worker)

    def _forget_unjudged(self, worker: WorkerKey) -> None:
        for request_id in [name for name, placed in self._unjudged.items() if placed.worker == worker]:
            del self._unjudged[request_id]

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _worker(self, worker: GenerationWorker) -> _Worker:
        known = self._workers.get(worker.key)
        if known is None:
            known = self._workers[worker.key] = _Worker(_kind_of(worker))
        return known

    def _tries_sources(self, kind: _Kind) -> bool:
        """Return True while too little is known of a kind to tell what a source saves."""
        return not self._fit(kind).is_settled and self._num_trials.get(kind, 0) < transfer.MOST_TRIALS

    def _fit(self, kind: _Kind) -> PrefillFit:
        fit = self._fits.get(kind)
        if fit is None:
            fit = self._fits[kind] = PrefillFit()
        return fit


def _key_of(source: KVSource) -> WorkerKey:
    return WorkerKey(source.engine_id, source.incarnation)


def _kind_of(worker: GenerationWorker) -> _Kind:
    return worker.facts.model_fingerprint, worker.role
