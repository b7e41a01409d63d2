"""The media of a step: embeddings computed or loaded before the decoder runs, kept, and merged where image tokens stand.

Owns the encoder cache of a worker and the worker side of its EC connector. The scheduler decides what is computed, loaded and
released (``core.sched.encoder_inputs``), ``core.model.image_encoder`` computes the embeddings, and
``core.engine.media.image_decode_thread`` delivers the pixels. Runs in every step, empty ones included.

An item may cross the border of a step; its image tokens count its rows:

    tokens      | computed ...... <image> <image> | scheduled: <image> text <image> | <image> ..
    row                            0       1                    2            3         4
    merged in this step                           |             *            *      |

Missing embeddings are reported as failed, and the step goes on with the image token's own embedding in their place: the
scheduler discards the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.torch_kernels import upload
from core.ec_connector import ECConnectorWorker, EmbeddingsLayout
from core.engine.input_batch import StepInputs
from core.engine.media.image_decode_queue import Pixels
from core.engine.media.image_decode_thread import ImageDecodeThread, ImageReader
from core.errors import EncoderInputMissing, KVFerryError
from core.model.decoder import EmbeddedRows
from core.request import ModelRunnerOutput, NewRequestData, SchedulerOutput
from core.wire.media import MMFeature
from core.wire.messages import ErrorInfo


class ImageEmbedder(ImageReader, Protocol):
    """What computes embeddings (``core.model.image_encoder.ImageEncoder``)."""

    def embed(self, tiles: Pixels) -> Tensor:
        """Return the embeddings ``[num_embeds, hidden_size]`` of the pixels of an image."""
        ...


@dataclass(frozen=True, slots=True)
class _Item:
    """One feature of a request; ``places`` are the positions of its image tokens, ascending."""

    feature: MMFeature
    places: npt.NDArray[np.int64]
    content: bytes


class EncoderRunner:
    """The encoder, its cache and its connector, on one device. Single-threaded, and called under ``torch.inference_mode``."""

    def __init__(
        self,
        encoder: ImageEmbedder,
        image_token_id: int,
        layout: EmbeddingsLayout,
        connector_worker: ECConnectorWorker | None = None,
    ) -> None:
        """Take an encoder whose rows have ``layout``; the connector learns it here."""
        self.cache: MutableMapping[bytes, Tensor] = {}
        self._encoder = encoder
        self.image_decode_thread = ImageDecodeThread(encoder)  # the worker starts it
        self._image_token_id = image_token_id
        self._layout = layout
        self._device = torch.device(layout.device)
        self._connector = connector_worker
        self._items: dict[str, list[_Item]] = {}
        self._failed: deque[dict[bytes, ErrorInfo]] = deque()  # of each step that has begun and not ended, oldest first
        self.failure: Exception | None = None  # of the connector, after a forward pass: the next step raises it
        if connector_worker is not None:
            connector_worker.register_caches(layout)

    def start_step(self, step: SchedulerOutput) -> None:
        """Delete, load and compute what the step asks for, before any token of it.

        Raises: the connector's error, here or after the last step's forward pass.
        """
        if self.failure is not None:
            raise self.failure
        self._failed.append({})
        for identifier in step.free_encoder_identifiers:
            self.cache.pop(identifier, None)
        for new in step.scheduled_new_reqs:
            self._items.pop(new.request_id, None)
            if new.mm_features:
                self._items[new.request_id] = self._find_items(new)
        if self._connector is not None and step.ec_connector_metadata is not None:
            self._connector.start_load_caches(self.cache, step.ec_connector_metadata)
        for request_id, indices in step.scheduled_encoder_inputs.items():
            for index in indices:
                self._encode(self._items[request_id][index])
        # One that has lost its blocks may be here again, as a new one of the same step.
        for request_id in (step.finished_req_ids | step.preempted_req_ids) - {
            new.request_id for new in step.scheduled_new_reqs
        }:
            self._items.pop(request_id, None)

    def merge(self, inputs: StepInputs) -> EmbeddedRows | None:
        """Return the rows of the step that embeddings of images take; None where no image token is computed."""
        if not self._items:
            return None
        rows: list[npt.NDArray[np.int64]] = []
        values: list[Tensor] = []
        borders = inputs.batches[0].query_start_loc.tolist()
        for request_id, first, last in zip(inputs.request_ids, borders, borders[1:], strict=False):
            items = self._items.get(request_id)
            start = int(inputs.positions[first])
            if items is None or start >= items[-1].feature.end:
                continue
            for item in items:
                low, high = np.searchsorted(item.places, (start, start + last - first))
                embeddings = self._embeddings_of(item) if low < high else None
                if embeddings is not None:
                    rows.append(item.places[low:high] - start + first)
                    values.append(embeddings[low:high])
        return EmbeddedRows(upload(np.concatenate(rows), self._device), torch.cat(values)) if rows else None

    def finish_step(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Add the connector's report, and the embeddings that were not there. Steps end in the order in which they began."""
        failed = self._failed.popleft()
        output.failed_embeddings = failed
        if self._connector is None:
            return
        try:
            report = self._connector.get_finished(step.finished_req_ids)
        except Exception as error:  # any error of a plugin; kept, so that sampled tokens reach their clients first
            self.failure = error
            return
        output.failed_embeddings = report.failed_loading | failed
        output.ec_connector_output = None if report.is_empty() else report

    def shutdown(self) -> None:
        """Stop the decoding of images and the connector's worker side."""
        self.image_decode_thread.shutdown()
        if self._connector is not None:
            self._connector.shutdown()

    def _find_items(self, new: NewRequestData) -> list[_Item]:
        image_tokens = np.flatnonzero(np.frombuffer(new.token_ids, dtype=np.int32) == self._image_token_id)
        return [_Item(feature, _within(image_tokens, feature), _content(new.media, feature)) for feature in new.mm_features]

    def _encode(self, item: _Item) -> None:
        """Compute an item; of a bad one say what is wrong. Where it stands, in each of its requests, the scheduler knows."""
        identifier = item.feature.identifier
        try:
            embeddings = self._embed(item)
        except KVFerryError as error:
            self._failed[-1][identifier] = ErrorInfo.of(error)
            self.cache.pop(identifier, None)  # left from before its eviction in the same step, of which no message tells
            return
        self.cache[identifier] = embeddings
        if self._connector is not None:
            self._connector.save_caches(self.cache, identifier)

    def _embed(self, item: _Item) -> Tensor:
        embeddings = self._encoder.embed(self.image_decode_thread.take(item.feature.identifier, item.content))
        self._check_num_rows(item, len(embeddings))
        return embeddings

    def _embeddings_of(self, item: _Item) -> Tensor | None:
        """Return an item's rows; None if they are missing or of the wrong number: then they are dropped.

        The scheduler counts failed embeddings as gone, so a tensor that stayed would use memory that is not accounted for.
        """
        identifier = item.feature.identifier
        embeddings = self.cache.get(identifier)
        try:
            if embeddings is None:
                raise EncoderInputMissing("embeddings are not in the encoder cache")
            self._check_num_rows(item, len(embeddings))
        except KVFerryError as error:
            self._failed[-1].setdefault(identifier, ErrorInfo.of(error))
            self.cache.pop(identifier, None)
            return None
        return embeddings

    def _check_num_rows(self, item: _Item, num_rows: int) -> None:
        if not num_rows == len(item.places) == item.feature.num_embeds:
            raise EncoderInputMissing(  # the client's file is not at fault: router and worker count otherwise
                f"it has {num_rows} embeddings for {len(item.places)} image tokens, {item.feature.num_embeds} were announced"
            )


def _within(image_tokens: npt.NDArray[np.int64], feature: MMFeature) -> npt.NDArray[np.int64]:
    low, high = np.searchsorted(image_tokens, (feature.offset, feature.end))
    return image_tokens[low:high].copy()


def _content(media: Sequence[bytes], feature: MMFeature) -> bytes:
    return media[feature.media_index] if feature.media_index < len(media) else b""
