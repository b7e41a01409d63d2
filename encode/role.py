"""The encode role's handling of requests: one engine request per image, one answer when all images can be read.

Owns the bookkeeping between ``EncodeRequest`` and ``EncodeDone``. Pure, like all handlers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import InvalidRequest
from core.request import EncodedImage, EngineCoreOutput, NewRequest
from core.wire.media import ECSource
from core.wire.messages import EncodeDone, EncodeFailed, EncodeRequest, ErrorInfo, Generate
from core.wire.sampling import SamplingParams
from core.worker.role import RoleHandler, RoleOutput, choice_id, deadline_of, output_error, split_choice_id


@dataclass(slots=True)
class _Encode:
    """One request in progress; its images have the numbers of its distinct features. ``errors`` are failures of this worker."""

    message: EncodeRequest
    media_indices: list[int]
    images: dict[int, EncodedImage] = field(default_factory=dict)
    errors: dict[int, ErrorInfo] = field(default_factory=dict)

    def sources(self) -> list[ECSource]:
        """Return where the finished images can be read."""
        return [image.source for image in self.images.values()]

    def open_ids(self) -> list[str]:
        """Return the engine requests that have not ended yet."""
        ended = self.images.keys() | self.errors.keys()
        numbers = range(len(self.media_indices))
        return [choice_id(self.message.request_id, number) for number in numbers if number not in ended]


@dataclass(frozen=True, slots=True)
class _Answered:
    """What an answer names, and the worker's time at which its leases end unless a reader renews them."""

    sources: list[ECSource]
    until: float


class EncodeHandler(RoleHandler):
    """Splits requests into images, and joins the outputs of the images."""

    def __init__(self) -> None:
        self._live: dict[str, _Encode] = {}
        self._answered: dict[str, _Answered] = {}  # oldest first

    def on_generate(self, message: Generate, now: float) -> list[NewRequest]:
        """Refuse a prompt.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("an encode worker embeds images and computes no prompts")

    def on_encode(self, message: EncodeRequest, now: float) -> list[NewRequest]:
        """Request each distinct image once.

        Raises:
            InvalidRequest: the request names no image.
        """
        features = list({feature.identifier: feature for feature in message.mm_features}.values())
        if not features:
            raise InvalidRequest("the request names no image", param="mm_features")
        self._live[message.request_id] = _Encode(message, [feature.media_index for feature in features])
        return [
            NewRequest(
                request_id=choice_id(message.request_id, number),
                prompt_token_ids=(),
                sampling=_NO_SAMPLING,
                choice_index=number,
                priority=message.priority,
                arrival_time=now,
                deadline=deadline_of(message, now),
                mm_features=(feature,),
                media=message.media,
            )
            for number, feature in enumerate(features)
        ]

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> RoleOutput:
        """Collect images; answer when all have ended, or one is bad."""
        result = RoleOutput()
        for output in outputs:
            request_id, number = split_choice_id(output.request_id)
            encode = self._live.get(request_id)
            if encode is None:
                result.release_sources += [output.encoded.source] if output.encoded is not None else []
                continue
            error = output_error(output)
            if error is not None and error.code == InvalidRequest.code:
                self._refuse(encode, number, error, result)
                continue
            if error is not None:
                encode.errors[number] = error
            else:
                assert output.encoded is not None, "an image without an error is somewhere"
                encode.images[number] = output.encoded
            if not encode.open_ids():
                self._answer(encode, now, result)
        return result

    def on_abort(self, request_id: str) -> RoleOutput:
        """Stop computing images that no other request waits for; after the answer, release what it names: none reads it."""
        encode = self._live.pop(request_id, None)
        if encode is None:
            answered = self._answered.pop(request_id, None)
            return RoleOutput(release_sources=answered.sources if answered is not None else [])
        return RoleOutput(abort_ids=encode.open_ids(), release_sources=encode.sources())

    def _answer(self, encode: _Encode, now: float, result: RoleOutput) -> None:
        """Name the finished images, and say why the others failed: a prefill worker computes these."""
        images = encode.images.values()
        if not images:
            error = next(iter(encode.errors.values()))
            result.replies.append(EncodeFailed(request_id=encode.message.request_id, error=error))
            self._end(encode, result)
            return
        self._remember(encode, now)
        result.replies.append(
            EncodeDone(
                request_id=encode.message.request_id,
                ec_sources=tuple(encode.sources()),
                errors=tuple(encode.errors.values()),
                num_cached=sum(image.was_cached for image in images),
                queue_ms=max(image.queue_s for image in images) * 1e3,
                encode_ms=max(image.compute_s for image in images) * 1e3,
            )
        )
        self._end(encode, result)

    def _remember(self, encode: _Encode, now: float) -> None:
        """Keep what an answer names until its leases have ended, unless readers renew them, and drop older answers."""
        while self._answered:
            oldest = next(iter(self._answered))
            if self._answered[oldest].until > now:
                break
            del self._answered[oldest]
        sources = encode.sources()
        self._answered[encode.message.request_id] = _Answered(sources, now + max(source.lease_ms for source in sources) / 1e3)

    def _refuse(self, encode: _Encode, number: int, error: ErrorInfo, result: RoleOutput) -> None:
        """Fail the request because of a bad image, which no worker can embed, and name that image."""
        failed = choice_id(encode.message.request_id, number)
        result.release_sources += encode.sources()
        result.abort_ids += [engine_id for engine_id in encode.open_ids() if engine_id != failed]
        media_index = encode.media_indices[number]
        result.replies.append(EncodeFailed(request_id=encode.message.request_id, error=error, media_index=media_index))
        self._end(encode, result)

    def _end(self, encode: _Encode, result: RoleOutput) -> None:
        result.ended.append(encode.message.request_id)
        del self._live[encode.message.request_id]


_NO_SAMPLING = SamplingParams()
