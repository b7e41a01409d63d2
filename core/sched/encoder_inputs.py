"""Media in the token step: which embeddings a step computes or loads, which requests wait, and when embeddings are released.

A request's next tokens are cut before the first item whose embeddings are not available in this step. Owns the encoder's
budget of a step and the scheduler side of the EC connector. ``core.sched.encoder_cache`` owns the space, ``ImageReadiness``
the decoded images. Knows no queue and no KV block. Items are served in one order: once an item found no room, no later item
gets any in the same step, so that small images cannot overtake a large one forever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from core.ec_connector import ECConnectorScheduler, ImageReadiness
from core.errors import EncoderInputMissing, InvalidRequest
from core.request import ModelRunnerOutput, Request, RequestStatus, SchedulerOutput
from core.sched.encoder_cache import EncoderCacheManager
from core.wire.messages import ErrorInfo


@dataclass(slots=True)
class EncoderPlan:
    """The next ``num_new_tokens`` tokens of a request and the features that come with them, by index.

    ``computed`` and ``loaded`` are new in the cache; ``duplicates`` show the same media as one of these. ``awaits_image``: the
    tokens end before one that has to be computed and is not decoded yet.
    """

    num_new_tokens: int
    computed: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    awaits_image: bool = False


@dataclass(slots=True)
class EncoderCounts:
    """Features by the source of their embeddings, and deferrals: steps in which a request waited for embeddings or an image."""

    num_computed: int = 0
    num_loaded: int = 0
    num_hits: int = 0
    num_deferrals: int = 0


class EncoderInputs:
    """The encoder's share in the steps of one engine.

    ``max_embeds_per_step`` bounds what one step computes, ``cache_size`` what the worker holds; a single item must fit both.
    Without ``images``, images count as decoded when they arrive.
    """

    def __init__(
        self,
        cache_size: int,
        max_embeds_per_step: int,
        connector: ECConnectorScheduler | None = None,
        images: ImageReadiness | None = None,
    ) -> None:
        self.cache = EncoderCacheManager(cache_size)
        self.connector = connector
        self._images = images if images is not None else ImageReadiness()
        if connector is not None:
            connector.bind_encoder_cache(self._count_on)
        self.max_item_embeds = min(cache_size, max_embeds_per_step)
        self.counts = EncoderCounts()
        self._max_embeds_per_step = max_embeds_per_step
        self._compute_budget = 0
        self._is_cut = False  # an item has found no room in this step
        self._counted_on: set[bytes] = set()  # cached items of the present request, which the connector need not fetch
        self._unavailable: dict[str, ErrorInfo] = {}

    def check_can_run(self, request: Request) -> None:
        """Refuse a request with media that can never be embedded here.

        Raises:
            InvalidRequest: an item needs more room than there is, or features overlap or leave the prompt.
        """
        end = 0
        for index, feature in enumerate(request.mm_features):
            if feature.num_embeds > self.max_item_embeds:
                raise self._too_large(index, feature.num_embeds)
            if feature.offset < end or feature.num_embeds > feature.length or feature.end > request.num_prompt_tokens:
                raise InvalidRequest(f"feature {index} overlaps another one or leaves the prompt", param="mm_features")
            end = feature.end

    def _too_large(self, index: int, num_embeds: int) -> InvalidRequest:
        message = f"image {index} takes {num_embeds} embeddings, this worker has room for {self.max_item_embeds}"
        if self.max_item_embeds:  # otherwise its model has no image input
            bounds = {"encoder_cache_embeds": self.cache.cache_size, "max_num_encoder_embeds": self._max_embeds_per_step}
            settings = " and ".join(f"scheduler.{name}" for name, bound in bounds.items() if bound < num_embeds)
            message += f": show a smaller one, or raise {settings}"
        return InvalidRequest(message, param=f"images[{index}]")

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Give the encoder its budget for the next step. Raises: the error that ended the image decode thread."""
        self._compute_budget = self._max_embeds_per_step
        self._is_cut = False
        self._images.begin_step()

    def is_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Return True if the request may be scheduled after these tokens, False while its embeddings are on their way.

        Called before anything is allocated for the request, and changes nothing: a waiting request holds nothing.
        """
        self._counted_on.clear()
        if self.connector is None or num_computed_tokens >= request.mm_end or request.has_failed_embedding:
            return True
        if self.connector.ensure_cache_available(request, num_computed_tokens):
            return True
        self.counts.num_deferrals += 1
        return False

    def try_schedule(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> EncoderPlan:
        """Decide how many of the next tokens can be computed, and where the embeddings for them come from.

        The window ends before the first item that finds neither room nor budget, or begins with it and is empty:

            tokens  | computed |---------- num_new_tokens ----------|
            items        [ cached ]   [ new ]      [ no room ]
            plan               |-------------------|

        A request that does not run yet and whose first item waits for its image gets no token, not even those before it: it
        would hold blocks while it waits. The image after the window is decoded while these tokens are computed.

        Cached embeddings are referenced, and room is made for the others. ``allocate`` follows; if the request does not get
        its blocks, ``release_computed`` drops the references.
        """
        plan = EncoderPlan(num_new_tokens)
        is_begun = request.status is RequestStatus.RUNNING
        for index, feature in enumerate(request.mm_features):
            if feature.end <= num_computed_tokens:
                continue
            if feature.offset >= num_computed_tokens + plan.num_new_tokens:
                self._announce(request, index)
                break
            if not self._plan_item(request, index, plan):
                plan.num_new_tokens = max(0, feature.offset - num_computed_tokens)
                break
            is_begun = True
        if plan.awaits_image and not (is_begun and plan.num_new_tokens):
            plan.num_new_tokens = 0
            self.counts.num_deferrals += 1
        return plan

    def announce(self, request: Request) -> None:
        """Request decoding of the first image after the KV that a request waits for; it is neither computed nor claimed.

        Done in every step, at the request's place in the order: the request holds blocks that cannot be preempted, and should
        not hold them longer to wait for an image. The last token is always computed, with the image that it belongs to.
        """
        start = min(request.num_computed_tokens, request.num_tokens - 1)
        index = next((index for index, feature in enumerate(request.mm_features) if feature.end > start), None)
        if index is not None:
            self._announce(request, index)

    def _announce(self, request: Request, index: int) -> None:
        """Request decoding of an image that will probably be computed soon."""
        identifier = request.mm_features[index].identifier
        is_computed = request.has_media(index) and not self.cache.has(identifier) and not self._can_load(request, identifier)
        if is_computed:
            self._is_ready(request, index)

    def _is_ready(self, request: Request, index: int) -> bool:
        feature = request.mm_features[index]
        return self._images.is_ready(request.request_id, feature, request.media[feature.media_index])

    def _plan_item(self, request: Request, index: int, plan: EncoderPlan) -> bool:
        """Add the source of an item's embeddings to the plan; return False if there is none in this step."""
        new = [*plan.computed, *plan.loaded]
        if request.mm_features[index].identifier in {request.mm_features[other].identifier for other in new}:
            plan.duplicates.append(index)
            return True
        if self.cache.holds(request, index):
            return True
        if self.cache.check_and_update_cache(request, index):
            self.counts.num_hits += 1
            return True
        return self._schedule_item(request, index, sum_embeds(request, new), plan)

    def _schedule_item(self, request: Request, index: int, num_embeds_to_schedule: int, plan: EncoderPlan) -> bool:
        """Add an item that is not cached to the plan, if it finds room and can be computed or loaded."""
        feature = request.mm_features[index]
        is_loaded = self._can_load(request, feature.identifier)
        if not is_loaded and not request.has_media(index):
            if feature.identifier in self._counted_on:
                return False  # an earlier item of the request has used the room; the connector is asked next time
            self._unavailable[request.request_id] = _missing(index)
            return False
        if not is_loaded and not self._is_ready(request, index):
            plan.awaits_image = True
            return False
        budget = feature.num_embeds if is_loaded else self._compute_budget - sum_embeds(request, plan.computed)
        if self._is_cut or not self.cache.can_allocate(request, index, budget, num_embeds_to_schedule):
            self._is_cut = True
            return False
        (plan.loaded if is_loaded else plan.computed).append(index)
        return True

    def _can_load(self, request: Request, identifier: bytes) -> bool:
        if self.connector is None or request.has_failed_embedding:
            return False  # a failed load is not repeated: every failure must bring the request nearer to its end
        return self.connector.has_cache_item(identifier)

    def _count_on(self, identifier: bytes) -> bool:
        """Inform the connector about an item in the cache, so that it does not fetch it."""
        is_here = self.cache.has(identifier)
        if is_here:
            self._counted_on.add(identifier)
        return is_here

    def allocate(self, request: Request, plan: EncoderPlan, output: SchedulerOutput) -> None:
        """Make a plan part of the step, after the request has got its KV blocks."""
        for index in plan.loaded:
            self._allocate_item(request, index, is_loaded=True)
        for index in plan.computed:
            self._allocate_item(request, index, is_loaded=False)
            self._images.claim(request.mm_features[index].identifier)
        for index in plan.duplicates:
            self.cache.check_and_update_cache(request, index)
        if plan.computed:
            output.scheduled_encoder_inputs[request.request_id] = plan.computed
        self._compute_budget -= sum_embeds(request, plan.computed)
        self.counts.num_computed += len(plan.computed)
        self.counts.num_loaded += len(plan.loaded)

    def _allocate_item(self, request: Request, index: int, *, is_loaded: bool) -> None:
        """Allocate room for an item. Inform the connector, unless it offers the item and this worker computes it anyway."""
        self.cache.allocate(request, index)
        if self.connector is None:
            return
        if is_loaded or not self.connector.has_cache_item(request.mm_features[index].identifier):
            self.connector.update_state_after_alloc(request, index)

    def give_up(self, request: Request) -> None:
        """Release the features of a request that does not run."""
        self.cache.free(request)

    def complete_output(self, output: SchedulerOutput) -> None:
        """Add the embeddings that the worker deletes, and last the connector's message. Ends the step for the encoder."""
        output.has_dropped_images = self._images.end_step()
        output.free_encoder_identifiers = self.cache.take_freed_identifiers()
        if self.connector is not None:
            output.ec_connector_metadata = self.connector.build_connector_meta(output)

    # ---- after a step ------------------------------------------------------------------------------------------------

    def update_from_output(self, model_output: ModelRunnerOutput) -> None:
        """Apply the worker's report: the connector's, and embeddings that are missing in its cache."""
        if self.connector is not None and model_output.ec_connector_output is not None:
            self.connector.update_connector_output(model_output.ec_connector_output)
        for identifier in model_output.failed_embeddings:
            self.cache.forget(identifier)

    def release_computed(self, requests: Mapping[str, Request]) -> None:
        """Release items whose last token is computed, and all items of requests that no longer run.

        Comes after a step, never in one: what a step computes or loads is referred to until it has run, so that it is not
        evicted before it is there, even if its request is preempted in that step.
        """
        for request_id in self.cache.holder_ids:
            request = requests[request_id]
            num_computed_tokens = request.num_computed_tokens - request.num_in_flight_tokens
            for index in self.cache.get_cached_input_ids(request):
                is_behind = request.mm_features[index].end <= num_computed_tokens
                if is_behind or request.status is not RequestStatus.RUNNING:
                    self.cache.free_encoder_input(request, index)

    def take_unavailable(self, requests: Mapping[str, Request]) -> dict[str, ErrorInfo]:
        """Return and forget the requests, of these, that can never run, and why."""
        found, self._unavailable = self._unavailable, {}
        if self.connector is not None:
            found |= self.connector.take_unavailable_requests()
        return {request_id: error for request_id, error in found.items() if request_id in requests}

    def request_finished(self, request: Request) -> None:
        """Forget a request."""
        if request.mm_features:
            self._images.forget(request.request_id, request.mm_features)
            if self.connector is not None:
                self.connector.request_finished(request)
        self._unavailable.pop(request.request_id, None)
        self.cache.free(request)


def sum_embeds(request: Request, indices: list[int]) -> int:
    """Return the embeddings that these features of a request take."""
    return sum(request.mm_features[index].num_embeds for index in indices)


def _missing(index: int) -> ErrorInfo:
    return ErrorInfo.of(
        EncoderInputMissing(
            f"embeddings of image {index} did not arrive, and the image is not at hand", param=f"images[{index}]"
        )
    )
