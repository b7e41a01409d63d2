"""One step of the model: from what the scheduler decided to sampled tokens.

Owns the running batch and the order of a step. Other modules build the input (``input_batch``, ``media.encoder_runner`` for
images), compute it (decoder and attention), sample (``sampler``) and move KV (``connector_steps``). Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.base import AttentionBackend, AttentionPlan
from core.attention.torch_kernels import upload
from core.connector import KVConnectorWorker
from core.engine.connector_steps import ConnectorSteps, with_layer_hooks
from core.engine.cuda.cuda_graphs import DecodeGraphs, GraphRecorder
from core.engine.input_batch import InputBatch, Promised, StepInputs
from core.engine.kv_pool import KVPool
from core.engine.media.encoder_runner import EncoderRunner
from core.engine.prompt_logprobs import PromptLogprobs, PromptRows
from core.engine.sampler import LaunchedSamples, launch_sampling
from core.kv.spec import ceil_div
from core.model.decoder import Decoder, attention_spec
from core.request import ModelRunnerOutput, SchedulerOutput
from core.wire.messages import ErrorInfo


def _done() -> None:
    """Wait for a step that is done when it is launched."""


@dataclass(slots=True)
class _Launched:
    """A step between its launch and its result. ``promised`` is None once ``samples`` have been taken."""

    output: ModelRunnerOutput = field(default_factory=ModelRunnerOutput)
    samples: LaunchedSamples | None = None
    promised: Promised | None = None
    wait: Callable[[], None] = field(default=_done)


class ModelRunner:
    """Runs steps on one device. Single-threaded; holds the state of requests between their first and last step."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        kv_pool: KVPool,
        connector_worker: KVConnectorWorker | None,
        batch: InputBatch,
        encoder: EncoderRunner | None = None,
    ) -> None:
        """Take the parts of a worker; ``encoder`` is for a model that sees images."""
        device = attention.cache.device
        self.decoder = decoder
        self._attention = with_layer_hooks(attention, connector_worker, kv_pool.config.layer_groups)
        self._kv_pool = kv_pool
        self._connector = ConnectorSteps(connector_worker, launch_is_asynchronous=device.type != "cpu")
        self._batch = batch
        self._encoder = encoder
        self._prompt_logprobs = PromptLogprobs()
        self._device = device
        self._newest = _Launched()  # the newest step that has sampled
        self.graphs: DecodeGraphs | None = None

    @property
    def failure(self) -> Exception | None:
        """An error of a connector that the next step will raise."""
        return self._connector.failure or (self._encoder.failure if self._encoder is not None else None)

    def record_graphs(self, recorder: GraphRecorder, sizes: Sequence[int], max_model_len: int) -> None:
        """Record decode steps of these batch sizes, to be replayed from now on where a step fits one."""
        groups = self._kv_pool.config.groups
        specs = [
            list(dict.fromkeys(attention_spec(self.decoder.arch, layer) for layer in group.layer_indices)) for group in groups
        ]
        max_blocks = [ceil_div(max_model_len, group.spec.block_size) for group in groups]
        self.graphs = DecodeGraphs(self._compute, self._attention, recorder, specs, max_blocks)
        self.graphs.record(sizes)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and wait for it; see ``launch_model``."""
        return self.launch_model(scheduler_output)()

    @torch.inference_mode()
    def launch_model(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Begin one step; an empty one only runs the connectors' sequence. Return a function that waits for its result.

        When that returns, every write of the step to the KV pool is done: blocks may be sealed, and freed
        ones reused by loads. The results must be taken in the order of the launches, each before the next step but one is
        launched.

        Raises: the error of a connector, here or after the last step's forward pass.
        """
        self._connector.before_forward(scheduler_output)
        if self._encoder is not None:
            self._encoder.start_step(scheduler_output)
        self._update_batch(scheduler_output)
        launched = _Launched()
        if scheduler_output.total_num_scheduled_tokens:
            self._run_tokens(scheduler_output, launched)
            launched.wait = self._mark()
        else:
            self._connector.after_launch(scheduler_output)
        return partial(self._collect, scheduler_output, launched)

    def shutdown(self) -> None:
        """Stop the connectors' worker sides, also if one fails. The pool stays: peers may still be reading."""
        try:
            self._connector.shutdown()
        finally:
            if self._encoder is not None:
                self._encoder.shutdown()

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        """Update the batch: remove requests that left or were preempted, add new ones, advance the others."""
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._batch.remove(request_id)
            self._prompt_logprobs.remove(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            self._batch.add(new)
            self._prompt_logprobs.add(new)
        cached = scheduler_output.scheduled_cached_reqs
        self._batch.advance(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids)

    @torch.inference_mode()
    def _collect(self, scheduler_output: SchedulerOutput, launched: _Launched) -> ModelRunnerOutput:
        """Wait for a step, then take the connectors through the end of theirs; return its result."""
        launched.wait()
        self._settle(launched)
        launched.output.kv_connector_output = self._connector.finish(scheduler_output)
        if self._encoder is not None:
            self._encoder.finish_step(scheduler_output, launched.output)
        return launched.output

    def _run_tokens(self, scheduler_output: SchedulerOutput, launched: _Launched) -> None:
        inputs = self._batch.prepare(scheduler_output.num_scheduled_tokens)
        self._kv_pool.zero_blocks(inputs.fresh_partial_blocks)
        prompt_parts = self._prompt_logprobs.select(inputs)
        last_rows = inputs.batches[0].query_start_loc[1:][inputs.samples].astype(np.int64) - 1
        hidden = self._forward(inputs, np.concatenate((last_rows, *(part.rows for part in prompt_parts))))
        self._connector.after_launch(scheduler_output)
        if len(last_rows):
            self._sample(inputs, hidden[: len(last_rows)], launched)
        self._take_prompt_logprobs(prompt_parts, hidden[len(last_rows) :], launched.output)

    def _forward(self, inputs: StepInputs, output_rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the hidden states of ``output_rows``, in this order."""
        num_tokens = len(inputs.input_ids)
        is_every_row = len(output_rows) == num_tokens and bool((output_rows == np.arange(num_tokens)).all())
        rows = None if is_every_row else upload(output_rows, self._device)
        embedded = None if self._encoder is None else self._encoder.merge(inputs)
        input_ids = self._input_ids(inputs)
        replayed = None if self.graphs is None or embedded is not None else self.graphs.run(inputs, input_ids)
        if replayed is not None:
            return replayed if rows is None else replayed[rows]
        return self.decoder.forward(
            input_ids,
            upload(inputs.positions, self._device),
            self._attention,
            [self._attention.plan(batch) for batch in inputs.batches],
            rows,
            embedded,
        )

    def _compute(self, input_ids: Tensor, positions: Tensor, plans: Sequence[AttentionPlan]) -> Tensor:
        return self.decoder.forward(input_ids, positions, self._attention, plans)

    def _input_ids(self, inputs: StepInputs) -> Tensor:
        """Return the tokens of the step, int32 ``[num_tokens]``; what the host does not know comes from the newest step."""
        input_ids = upload(inputs.input_ids, self._device)
        if len(inputs.unknown):
            assert self._newest.samples is not None
            chosen = self._newest.samples.on_device[upload(inputs.sampled_slots, self._device)]
            input_ids[upload(inputs.unknown, self._device)] = chosen.to(torch.int32)
        return input_ids

    def _sample(self, inputs: StepInputs, hidden: Tensor, launched: _Launched) -> None:
        rows = inputs.rows[inputs.samples]
        if self._batch.sampling.has_edits[rows].any():  # penalties count the tokens of the step before
            self._newest.wait()
            self._settle(self._newest)
        launched.samples = launch_sampling(self.decoder.compute_logits(hidden), self._batch.sampling, rows)
        launched.promised = self._batch.promise(rows)
        self._newest = launched

    def _settle(self, launched: _Launched) -> None:
        """Take what a step has chosen, which is on the host by now: into the batch, and into its result. Once."""
        promised, launched.promised = launched.promised, None
        if promised is None or launched.samples is None:
            return
        sampled, output = launched.samples.finish(), launched.output
        self._batch.keep(promised, sampled.token_ids)
        request_ids = promised.request_ids
        output.sampled_token_ids = {
            request_id: [token_id] for request_id, token_id in zip(request_ids, sampled.token_ids, strict=True)
        }
        if sampled.logprobs:
            found = zip(request_ids, sampled.logprobs, strict=True)
            output.logprobs = {request_id: [entry] for request_id, entry in found if entry is not None}
        output.failed = {request_ids[slot]: ErrorInfo.of(error) for slot, error in sampled.failures.items()}
        output.refused = {request_ids[slot]: ErrorInfo.of(error) for slot, error in sampled.refusals.items()}
        for request_id in (*output.failed, *output.refused):
            del output.sampled_token_ids[request_id]

    def _mark(self) -> Callable[[], None]:
        """Return what waits for all that is launched by now; the CPU is done when a launch returns."""
        if self._device.type == "cpu":
            return _done
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def _take_prompt_logprobs(self, parts: list[PromptRows], hidden: Tensor, output: ModelRunnerOutput) -> None:
        start = 0
        for part in parts:
            end = start + len(part.rows)
            entries = self._prompt_logprobs.take(part, hidden[start:end], self.decoder.compute_logits)
            if entries is not None:
                output.prompt_logprobs[part.request_id] = entries
            start = end
