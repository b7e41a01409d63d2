"""An EC connector whose answers a test writes down, for a ``HashModel``.

``EmbeddingScript`` is both sides as the test sees them; the two classes play it to the scheduler and to the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from core.ec_connector import ECConnectorScheduler, ECConnectorWorker, EmbeddingsLayout
from core.errors import PeerUnreachable
from core.request import ECConnectorMetadata, ECConnectorOutput, Request, SchedulerOutput
from core.testing.hash_encoder import as_rows, embed
from core.wire.messages import ErrorInfo


@dataclass
class EmbeddingScript:
    """The connector's answers, and the questions that it was asked.

    ``here`` are files whose embeddings can be loaded, by identifier; of those in ``on_the_way`` requests must wait, unless they
    are in the encoder cache. What is ``lost`` cannot be loaded although it was offered. ``unavailable`` requests end.
    """

    here: dict[bytes, bytes] = field(default_factory=dict)
    on_the_way: set[bytes] = field(default_factory=set)
    lost: set[bytes] = field(default_factory=set)
    unavailable: dict[str, ErrorInfo] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    saved: list[bytes] = field(default_factory=list)
    report: ECConnectorOutput = field(default_factory=ECConnectorOutput)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of the calls of one method, in order."""
        return [call[1:] for call in self.calls if call[0] == name]


@dataclass
class EmbeddingLoads(ECConnectorMetadata):
    """The items that the worker side must load: identifiers with the numbers of their embeddings."""

    loads: list[tuple[bytes, int]]


class ScriptedECScheduler(ECConnectorScheduler):
    """The side inside the scheduler."""

    def __init__(self, script: EmbeddingScript) -> None:
        self.script = script
        self._loads: list[tuple[bytes, int]] = []
        self._is_cached: Callable[[bytes], bool] = lambda identifier: False

    def bind_encoder_cache(self, holds: Callable[[bytes], bool]) -> None:
        """Keep ``holds``, which says whether an item is cached and needs no wait."""
        self._is_cached = holds

    def has_cache_item(self, identifier: bytes) -> bool:
        """See ``EmbeddingScript.here``."""
        return identifier in self.script.here

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """See ``EmbeddingScript.on_the_way``."""
        self.script.calls.append(("ensure", request.request_id, num_computed_tokens))
        needed = [feature.identifier for feature in request.mm_features if feature.end > num_computed_tokens]
        is_waiting = any(name in self.script.on_the_way and not self._is_cached(name) for name in needed)
        return not is_waiting and request.request_id not in self.script.unavailable

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Plan the load of what is here."""
        feature = request.mm_features[index]
        self.script.calls.append(("alloc", request.request_id, index))
        if self.has_cache_item(feature.identifier):
            self._loads.append((feature.identifier, feature.num_embeds))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EmbeddingLoads:
        """Return the loads and start a new list."""
        loads, self._loads = self._loads, []
        return EmbeddingLoads(loads)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Note the report."""
        self.script.calls.append(("update", output))

    def request_finished(self, request: Request) -> None:
        """Note the end."""
        self.script.calls.append(("finished", request.request_id))

    def take_unavailable_requests(self) -> Mapping[str, ErrorInfo]:
        """See ``EmbeddingScript.unavailable``."""
        unavailable, self.script.unavailable = self.script.unavailable, {}
        return unavailable


class ScriptedECWorker(ECConnectorWorker):
    """The worker side of the encoder."""

    def __init__(self, script: EmbeddingScript) -> None:
        self.script = script

    def register_caches(self, layout: EmbeddingsLayout) -> None:
        """Nothing to prepare."""

    def start_load_caches(self, encoder_cache: MutableMapping[bytes, Any], metadata: ECConnectorMetadata) -> None:
        """Compute what another worker would have computed."""
        assert isinstance(metadata, EmbeddingLoads)
        for identifier, num_embeds in metadata.loads:
            if identifier in self.script.lost:
                error = PeerUnreachable("the encode worker went away")
                self.script.report.failed_loading[identifier] = ErrorInfo.of(error)
                continue
            encoder_cache[identifier] = as_rows(embed(self.script.here[identifier], num_embeds))
            self.script.report.finished_loading.add(identifier)

    def save_caches(self, encoder_cache: Mapping[bytes, Any], identifier: bytes) -> None:
        """Note the offer."""
        assert identifier in encoder_cache, "what is saved is in the encoder cache"
        self.script.saved.append(identifier)

    def get_finished(self, finished_req_ids: set[str]) -> ECConnectorOutput:
        """Return the report and start a new one."""
        report, self.script.report = self.script.report, ECConnectorOutput()
        return report
