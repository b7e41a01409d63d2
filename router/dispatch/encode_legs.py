"""The encode leg of requests with images: which encode worker embeds which image. A synchronous state machine without I/O.

Owns the assignment of a request's images to encode workers, and which worker embedded an image last, so that the next request
with this image goes to the same worker. The worker that computes the prompt receives the images too, and embeds those that no
encode worker has embedded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from core.wire.media import MMFeature
from core.wire.messages import Abort, EncodeDone, EncodeRequest
from router.dispatch.inflight import InflightCounts
from router.dispatch.members import EncodeWorker, GenerationWorker, WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.request_state import EncodeEnded, Encoding, RequestState, SendToWorker

MAX_KNOWN_IMAGES = 65536
_NOT_EMBEDDED = "not_embedded"  # the outcome of images about which an answer says nothing


class EncodeLegs:
    """The encode legs of all requests of a router. Times are seconds of its clock."""

    def __init__(self, membership: Membership, inflight: InflightCounts, timeout_s: float) -> None:
        self._membership = membership
        self._inflight = inflight
        self._timeout_s = timeout_s
        self._known: OrderedDict[bytes, WorkerKey] = (
            OrderedDict()
        )  # identifier → the worker that embedded it last; oldest use first

    def begin(self, request: RequestState, reader: GenerationWorker, now: float) -> list[SendToWorker]:
        """Assign the images of a request to encode workers whose embeddings ``reader`` can load; [] if there are none."""
        if request.encoding is not None or not request.submission.mm_features:
            return []  # later attempts use the embeddings of the first
        shares = self._share(request.submission.mm_features, reader)
        request.encoding = Encoding(deadline=min(request.deadline.at, now + self._timeout_s), wire_id=request.wire_id)
        sends = []
        for encoder, features in shares:
            request.encoding.waiting[encoder.key] = frozenset(feature.identifier for feature in features)
            self._inflight.take(request, encoder, len(features))
            sends.append(SendToWorker(encoder.key, _message(request, features, now)))
        return sends

    def on_done(self, request: RequestState, key: WorkerKey, message: EncodeDone) -> list[EncodeEnded]:
        """Record the sources of embeddings; return the images by outcome, [] if the request does not wait for this worker."""
        wanted = self._stop_waiting(request, key)
        if wanted is None or request.encoding is None:
            return []
        request.encoding.untold.append(key)
        found = {source.seal.identifier: source for source in message.ec_sources if source.seal.identifier in wanted}
        request.ec_sources |= found
        for identifier in found:
            self._remember(identifier, key)
        failed = [error.code for error in message.errors] + [_NOT_EMBEDDED] * len(wanted)
        outcomes = Counter(["done"] * len(found) + failed[: len(wanted) - len(found)])
        num_cached = min(message.num_cached, len(found))
        return [
            EncodeEnded(request.request_id, key, outcome, count, num_cached if outcome == "done" else 0)
            for outcome, count in outcomes.items()
        ]

    def give_up(self, request: RequestState, key: WorkerKey, code: str) -> EncodeEnded | None:
        """Stop waiting for a worker with the outcome ``code``; return None if the request does not wait for it."""
        wanted = self._stop_waiting(request, key)
        return EncodeEnded(request.request_id, key, code, len(wanted)) if wanted is not None else None

    def stop(self, request: RequestState, key: WorkerKey, code: str) -> list[SendToWorker]:
        """Return the abort for a worker that ``give_up`` has ended and that is still there: it may embed, or have answered."""
        return [_abort(request.encoding, key, code)] if request.encoding is not None else []

    def give_up_all(self, request: RequestState, code: str) -> list[EncodeEnded | SendToWorker]:
        """Stop waiting for all encode workers of a request, and abort their work."""
        if request.encoding is None:
            return []
        waiting = list(request.encoding.waiting)
        actions: list[EncodeEnded | SendToWorker] = [_abort(request.encoding, key, code) for key in waiting]
        for key in waiting:
            ended = self.give_up(request, key, code)
            actions += [ended] if ended else []
        return actions

    def on_prompt_sent(self, request: RequestState) -> None:
        """Leave the embeddings to the worker that has been told of them: it reads or releases them, unless it refuses."""
        if request.encoding is not None:
            request.encoding.told, request.encoding.untold = request.encoding.untold, []

    def on_prompt_refused(self, request: RequestState) -> None:
        """Take the embeddings back from a worker that did not admit the prompt, and so looked at none of them."""
        if request.encoding is not None:
            request.encoding.untold += request.encoding.told
            request.encoding.told = []

    def aborts(self, request: RequestState, reason: str) -> list[SendToWorker]:
        """Return the aborts for all encode workers that the request waits for, or whose embeddings nobody will read."""
        encoding = request.encoding
        if encoding is None:
            return []
        return [_abort(encoding, key, reason) for key in (*encoding.waiting, *encoding.untold)]

    def _stop_waiting(self, request: RequestState, key: WorkerKey) -> frozenset[bytes] | None:
        wanted = request.encoding.waiting.pop(key, None) if request.encoding else None
        if wanted is not None:
            self._inflight.free(request, key)
        return wanted

    def _remember(self, identifier: bytes, key: WorkerKey) -> None:
        self._known[identifier] = key
        self._known.move_to_end(identifier)
        if len(self._known) > MAX_KNOWN_IMAGES:
            self._known.popitem(last=False)

    def _share(self, features: Sequence[MMFeature], reader: GenerationWorker) -> list[tuple[EncodeWorker, list[MMFeature]]]:
        """Divide the images among encode workers: each goes to the worker that embedded it last, else to the least loaded."""
        encoders = [encoder for encoder in self._membership.encoders if _fits(encoder, reader)]
        shares: dict[WorkerKey, list[MMFeature]] = {encoder.key: [] for encoder in encoders}
        for feature in {feature.identifier: feature for feature in features}.values():
            chosen = choose_encoder(encoders, shares, self._known.get(feature.identifier), reader.facts.host_id)
            if chosen is not None:
                shares[chosen.key].append(feature)
        return [(encoder, shares[encoder.key]) for encoder in encoders if shares[encoder.key]]


def choose_encoder(
    encoders: Iterable[EncodeWorker], shares: Mapping[WorkerKey, Sequence[MMFeature]], known: WorkerKey | None, host_id: str
) -> EncodeWorker | None:
    """Return the encode worker that takes one more image in addition to its share; None if all are full.

    The worker that embedded the image before (``known``) comes first, then workers on the reader's host, then the least loaded.
    """

    def cost(encoder: EncodeWorker) -> tuple[bool, bool, float, int]:
        held = encoder.num_held + len(shares[encoder.key])
        is_far = not host_id or encoder.facts.host_id != host_id
        return encoder.key != known, is_far, held / encoder.facts.max_num_images, encoder.last_picked

    able = [encoder for encoder in encoders if encoder.has_room(len(shares[encoder.key]) + 1)]
    return min(able, key=cost, default=None)


def _fits(encoder: EncodeWorker, reader: GenerationWorker) -> bool:
    """Return True if a worker can load the embeddings of an encode worker."""
    return (
        not encoder.is_closed
        and encoder.facts.ec_connector == reader.facts.ec_connector
        and encoder.facts.model_fingerprint == reader.facts.model_fingerprint
    )


def _abort(encoding: Encoding, key: WorkerKey, reason: str) -> SendToWorker:
    return SendToWorker(key, Abort(request_ids=(encoding.wire_id,), reason=reason))


def _message(request: RequestState, features: Sequence[MMFeature], now: float) -> EncodeRequest:
    """Return the request to embed ``features``, with only the image files that they need."""
    wanted = {feature.media_index for feature in features}
    assert request.encoding is not None
    return EncodeRequest(
        request_id=request.encoding.wire_id,
        mm_features=tuple(features),
        media=tuple(content if index in wanted else b"" for index, content in enumerate(request.submission.media)),
        priority=request.submission.priority,
        deadline_ms=max(1, round((request.encoding.deadline - now) * 1000)),
    )
