"""The encode leg of requests with images: who embeds what, and what is known of it. A synchronous state machine without I/O.

Owns which encode worker has which images of a request, and where an image was embedded last, so that it is not embedded again
elsewhere. Knows nothing of prefill and decode: ``router.dispatch.dispatcher`` asks it to begin, tells it what happens, and
goes on with the request when nobody is waited for any more. Whoever computes the prompt has the images as well, and embeds
what nobody else has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from core.wire.media import MMFeature
from core.wire.messages import Abort, EncodeDone, EncodeRequest
from router.dispatch.inflight import InflightCounts
from router.dispatch.members import Encoder, Worker, WorkerKey
from router.dispatch.membership import Membership
from router.dispatch.request_state import EncodeEnded, Encoding, RequestState, Send

MAX_KNOWN_IMAGES = 65536


class EncodeLegs:
    """The encode legs of all requests of a router. Times are seconds of its clock."""

    def __init__(self, membership: Membership, inflight: InflightCounts, timeout_s: float) -> None:
        self._membership = membership
        self._inflight = inflight
        self._timeout_s = timeout_s
        self._known: OrderedDict[bytes, WorkerKey] = OrderedDict()  # identifier → who embedded it last; oldest use first

    def begin(self, request: RequestState, reader: Worker, now: float) -> list[Send]:
        """Give the images of a request to encode workers whose embeddings ``reader`` can load; nothing if there is none."""
        if request.encoding is not None or not request.submission.mm_features:
            return []  # a second attempt uses what the first one knows
        shares = self._share(request.submission.mm_features, reader)
        request.encoding = Encoding(deadline=min(request.deadline, now + self._timeout_s))
        sends = []
        for encoder, features in shares:
            request.encoding.waiting[encoder.key] = frozenset(feature.identifier for feature in features)
            self._inflight.take(request, encoder, len(features))
            sends.append(Send(encoder.key, _message(request, features, now)))
        return sends

    def on_done(self, request: RequestState, key: WorkerKey, message: EncodeDone) -> EncodeEnded | None:
        """Note where embeddings lie; None if this worker is not waited for."""
        wanted = self._stop_waiting(request, key)
        if wanted is None:
            return None
        for source in message.ec_sources:
            if source.seal.identifier in wanted:
                request.ec_sources[source.seal.identifier] = source
                self._remember(source.seal.identifier, key)
        return EncodeEnded(request.request_id, key, "done", len(wanted), message.num_cached)

    def give_up(self, request: RequestState, key: WorkerKey, code: str) -> EncodeEnded | None:
        """Wait for a worker no more, whatever ``code`` says has happened; None if it is not waited for."""
        wanted = self._stop_waiting(request, key)
        return EncodeEnded(request.request_id, key, code, len(wanted)) if wanted is not None else None

    def give_up_all(self, request: RequestState, code: str) -> list[EncodeEnded | Send]:
        """Wait for nobody any more, and tell those who are at work."""
        actions: list[EncodeEnded | Send] = list(self.aborts(request, code))
        for key in list(request.encoding.waiting) if request.encoding else ():
            ended = self.give_up(request, key, code)
            actions += [ended] if ended else []
        return actions

    def aborts(self, request: RequestState, reason: str) -> list[Send]:
        """Return what stops those who are at work on a request."""
        waiting = request.encoding.waiting if request.encoding else ()
        return [Send(key, Abort(request_ids=(request.wire_id,), reason=reason)) for key in waiting]

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

    def _share(self, features: Sequence[MMFeature], reader: Worker) -> list[tuple[Encoder, list[MMFeature]]]:
        """Divide the images among encode workers: to the one that knows an image, else to the least loaded."""
        encoders = [encoder for encoder in self._membership.encoders if _fits(encoder, reader)]
        shares: dict[WorkerKey, list[MMFeature]] = {encoder.key: [] for encoder in encoders}
        for feature in {feature.identifier: feature for feature in features}.values():
            chosen = choose_encoder(encoders, shares, self._known.get(feature.identifier), reader.facts.host_id)
            if chosen is not None:
                shares[chosen.key].append(feature)
        return [(encoder, shares[encoder.key]) for encoder in encoders if shares[encoder.key]]


def choose_encoder(
    encoders: Iterable[Encoder], shares: Mapping[WorkerKey, Sequence[MMFeature]], known: WorkerKey | None, host_id: str
) -> Encoder | None:
    """Return who embeds one image more beside its share so far; None if all are full.

    The worker that has embedded it before comes first, then those on the reader's host, and of them the least loaded.
    """

    def cost(encoder: Encoder) -> tuple[bool, bool, float, int]:
        held = encoder.num_held + len(shares[encoder.key])
        is_far = not host_id or encoder.facts.host_id != host_id
        return encoder.key != known, is_far, held / encoder.facts.max_num_images, encoder.last_picked

    able = [encoder for encoder in encoders if encoder.has_room(len(shares[encoder.key]) + 1)]
    return min(able, key=cost, default=None)


def _fits(encoder: Encoder, reader: Worker) -> bool:
    """Say whether a worker can load what an encode worker offers."""
    return (
        not encoder.is_closed
        and encoder.facts.ec_connector == reader.facts.ec_connector
        and encoder.facts.model_fingerprint == reader.facts.model_fingerprint
    )


def _message(request: RequestState, features: Sequence[MMFeature], now: float) -> EncodeRequest:
    """Return what asks for some images; the files of the others stay out."""
    wanted = {feature.media_index for feature in features}
    assert request.encoding is not None
    return EncodeRequest(
        request_id=request.wire_id,
        mm_features=tuple(features),
        media=tuple(content if index in wanted else b"" for index, content in enumerate(request.submission.media)),
        priority=request.submission.priority,
        deadline_ms=max(1, round((request.encoding.deadline - now) * 1000)),
    )
