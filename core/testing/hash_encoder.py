"""The encoder of a ``HashModel``: an embedding is a hash of the image file, so a wrong one changes every later token.

Takes the place of a vision tower in a real runner: it computes the embeddings that the scheduler orders, holds the encoder
cache, merges rows into the tokens of a step, and runs the worker side of an EC connector. A row is 8 bytes; ``input_ids_of``
gives the model's input at each position, for the oracle. A file that begins with ``BAD_IMAGE`` cannot be embedded. No torch:
entries of the cache are arrays, which connectors under test must accept as tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from core.ec_connector import ECConnectorWorker, EmbeddingsLayout
from core.errors import EncoderInputMissing, InvalidRequest
from core.kv.hashing import hash_media
from core.request import ECConnectorOutput, SchedulerOutput
from core.wire.media import MMFeature
from core.wire.messages import ErrorInfo

Rows = npt.NDArray[np.uint8]

IMAGE_TOKEN_ID = 3  # in the span of an item it is replaced by one embedding; elsewhere it is an ordinary token
ROW_END_TOKEN_ID = 4
ROW_BYTES = 8
BAD_IMAGE = b"bad image"
HASH_EMBEDDINGS = EmbeddingsLayout(hidden_size=2, dtype="float32", itemsize=4)
_FINGERPRINT = b"hash-model encoder"
_MISSING_ROW = -1  # stands in for a missing row; tokens computed from it must not be used


def identify(media: bytes) -> bytes:
    """Return the identifier of a file's embeddings."""
    return hash_media(_FINGERPRINT, b"", media)


def embed(media: bytes, num_embeds: int) -> bytes:
    """Return the embeddings of a file, ``ROW_BYTES`` each."""
    rows = (hashlib.blake2b(media, digest_size=ROW_BYTES, key=b"%d" % row).digest() for row in range(num_embeds))
    return b"".join(rows)


def as_rows(embeddings: bytes) -> Rows:
    """Return embeddings as an entry of a cache, [num_embeds, ROW_BYTES] uint8."""
    return np.frombuffer(embeddings, dtype=np.uint8).reshape(-1, ROW_BYTES)


def image_feature(media: bytes, offset: int, num_embeds: int, media_index: int = 0, length: int | None = None) -> MMFeature:
    """Return the feature of a file whose ``num_embeds`` image tokens are within ``length`` tokens from ``offset`` on."""
    return MMFeature(
        identifier=identify(media),
        offset=offset,
        length=num_embeds if length is None else length,
        num_embeds=num_embeds,
        media_index=media_index,
    )


@dataclass(frozen=True, slots=True)
class Image:
    """An image laid out in a prompt: a file, its embeddings, and a non-image token after every ``row`` of them."""

    media: bytes
    num_embeds: int = 8
    row: int = 0

    @property
    def identifier(self) -> bytes:
        """Return the name of its embeddings."""
        return image_feature(self.media, 0, self.num_embeds).identifier

    @property
    def token_ids(self) -> list[int]:
        """Return its span."""
        tokens = [IMAGE_TOKEN_ID] * self.num_embeds
        if not self.row:
            return tokens
        rows = [[*tokens[at : at + self.row], ROW_END_TOKEN_ID] for at in range(0, len(tokens), self.row)]
        return [token for row in rows for token in row]


def lay_out(parts: Sequence[Sequence[int] | Image]) -> tuple[list[int], tuple[MMFeature, ...], tuple[bytes, ...]]:
    """Return tokens, features and files of a prompt that consists of texts, as token ids, and images."""
    token_ids: list[int] = []
    features: list[MMFeature] = []
    media: list[bytes] = []
    for part in parts:
        if not isinstance(part, Image):
            token_ids += part
            continue
        span = part.token_ids
        features.append(image_feature(part.media, len(token_ids), part.num_embeds, len(media), len(span)))
        media.append(part.media)
        token_ids += span
    return token_ids, tuple(features), tuple(media)


def input_ids_of(token_ids: Sequence[int], features: Sequence[MMFeature], media: Sequence[bytes]) -> list[int]:
    """Return the model's input: each token's id, or the number of its embedding."""
    inputs = list(token_ids)
    for feature in features:
        merge_rows(inputs, feature, embed(media[feature.media_index], feature.num_embeds))
    return inputs


def merge_rows(inputs: MutableSequence[int], feature: MMFeature, rows: bytes | None) -> None:
    """Put the rows of an item into the positions of its image tokens; a missing row is replaced by ``_MISSING_ROW``."""
    positions = [at for at in range(feature.offset, feature.end) if inputs[at] == IMAGE_TOKEN_ID]
    assert len(positions) == feature.num_embeds, f"{len(positions)} image tokens for {feature.num_embeds} embeddings"
    for row, position in enumerate(positions):
        part = rows[row * ROW_BYTES : (row + 1) * ROW_BYTES] if rows is not None else None
        inputs[position] = int.from_bytes(part, "little", signed=True) if part is not None else _MISSING_ROW


class HashEncoder:
    """One worker's encoder and its cache. ``num_encoded`` counts the computations by identifier.

    ``take`` returns the pixels of a decoded image, and forgets them; None: there are none. Without it images need no decoding.
    """

    def __init__(
        self, connector_worker: ECConnectorWorker | None = None, take: Callable[[bytes], object] | None = None
    ) -> None:
        self.cache: dict[bytes, Any] = {}
        self.num_encoded: Counter[bytes] = Counter()
        self._connector = connector_worker
        self._take = take
        self._requests: dict[str, tuple[tuple[MMFeature, ...], tuple[bytes, ...]]] = {}
        self._failed: dict[bytes, ErrorInfo] = {}
        if connector_worker is not None:
            connector_worker.register_caches(HASH_EMBEDDINGS)

    def start_step(self, step: SchedulerOutput) -> None:
        """Delete, load and compute the entries that the step orders, before any token of it."""
        self._failed = {}
        for identifier in step.free_encoder_identifiers:
            self.cache.pop(identifier, None)  # a test may have removed it
        for new in step.scheduled_new_reqs:
            if new.mm_features:
                self._requests[new.request_id] = new.mm_features, new.media
        if self._connector is not None and step.ec_connector_metadata is not None:
            self._connector.start_load_caches(self.cache, step.ec_connector_metadata)
        for request_id, indices in step.scheduled_encoder_inputs.items():
            for index in indices:
                self._encode(request_id, index)
        for request_id in (step.finished_req_ids | step.preempted_req_ids) - {
            new.request_id for new in step.scheduled_new_reqs
        }:
            self._requests.pop(request_id, None)

    def merge(self, request_id: str, token_ids: array[int], start: int, end: int) -> Sequence[int]:
        """Return the model's input at the positions of a sequence; valid from ``start`` to ``end`` only."""
        features, _ = self._requests.get(request_id, ((), ()))
        needed = [feature for feature in features if feature.end > start and feature.offset < end]
        if not needed:
            return token_ids
        inputs = token_ids.tolist()
        for feature in needed:
            merge_rows(inputs, feature, self._rows_of(feature))
        return inputs

    def finish_step(self, step: SchedulerOutput) -> tuple[ECConnectorOutput | None, dict[bytes, ErrorInfo]]:
        """Return the connector's report, None if it has none, and the embeddings that were missing."""
        if self._connector is None:
            return None, self._failed
        output = self._connector.get_finished(step.finished_req_ids)
        failed = output.failed_loading | self._failed
        return None if output.is_empty() else output, failed

    def shutdown(self) -> None:
        """Stop the connector's worker side."""
        if self._connector is not None:
            self._connector.shutdown()

    def _encode(self, request_id: str, index: int) -> None:
        features, files = self._requests[request_id]
        feature = features[index]
        media = files[feature.media_index]
        assert media, f"{request_id}: the image of feature {index} is not at hand"
        if self._take is not None:
            assert self._take(feature.identifier) is not None, f"{request_id}: the image of feature {index} is not prepared"
        self.num_encoded[feature.identifier] += 1
        if media.startswith(BAD_IMAGE):
            self._failed[feature.identifier] = ErrorInfo.of(InvalidRequest("it is damaged"))
            return
        self.cache[feature.identifier] = as_rows(embed(media, feature.num_embeds))
        if self._connector is not None:
            self._connector.save_caches(self.cache, feature.identifier)

    def _rows_of(self, feature: MMFeature) -> bytes | None:
        rows = self.cache.get(feature.identifier)
        if rows is None:
            error = EncoderInputMissing("embeddings are not in the encoder cache")
            self._failed.setdefault(feature.identifier, ErrorInfo.of(error))
            return None
        content = bytes(rows)
        assert len(content) == feature.num_embeds * ROW_BYTES, "embeddings of another image"
        return content


class HashImageEncoder:
    """The encoder of an encode worker, for these images. Other files are bad."""

    layout = HASH_EMBEDDINGS

    def __init__(self, images: Sequence[Image]) -> None:
        self._images = {image.media: image for image in images}

    def identify(self, content: bytes) -> bytes:
        """Return the identifier of a file's embeddings."""
        return identify(content)

    def prepare(self, content: bytes) -> Any:  # noqa: ANN401  stands for pixels
        """Return the bytes of a file as an array. Raises: InvalidRequest for a bad one."""
        if content not in self._images:
            raise InvalidRequest("it cannot be read")
        return np.frombuffer(content, dtype=np.uint8)

    def prepared_bytes(self, num_embeds: int) -> int:
        """Return an image's share of a budget."""
        return num_embeds

    def embed(self, tiles: Any) -> Any:  # noqa: ANN401  stand for pixels and a tensor
        """Return the embeddings of a file's bytes."""
        content = tiles.tobytes()
        return as_rows(embed(content, self._images[content].num_embeds))
