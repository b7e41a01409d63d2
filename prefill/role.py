"""The prefill role: compute a prompt, return the first token of each choice, keep the KV blocks for a decode worker.

Owns the bookkeeping of requests between ``Generate`` and ``PrefillDone``, and which handoff belongs to which request, so that
an abort that crosses ``PrefillDone`` still frees the blocks. Knows nothing of sockets or leases: the worker process carries
the messages, the connector holds the blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from core.errors import InvalidRequest
from core.request import EngineCoreOutput, NewRequest, SealedPrefix
from core.wire.early import PrefillProgress
from core.wire.kv import KVHandoff
from core.wire.messages import (
    ErrorInfo,
    FinishReason,
    Generate,
    PrefillChoice,
    PrefillDone,
    RequestFailed,
    TokenLogprobs,
    TransferUsage,
)
from core.worker.role import (
    EngineFacts,
    RoleHandler,
    RoleOutput,
    choice_id,
    output_error,
    request_of_choice,
    split_choice_id,
)

MAX_REMEMBERED_HANDOFFS = 4096  # of answered requests; beyond it the lease alone frees the blocks of a crossed abort


@dataclass(slots=True)
class _Prefill:
    """One request on its way to ``PrefillDone``."""

    message: Generate
    arrival_time: float
    waves: list[list[NewRequest]]  # the requests that start once all earlier ones have their tokens
    num_begun: int = 1
    choices: dict[int, PrefillChoice] = field(default_factory=dict)
    kv_handoff: KVHandoff | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    queue_ms: float = 0.0
    recomputed_tokens: int = 0
    fallback_reason: str = ""
    kv_transfer: TransferUsage | None = None

    def choice_ids(self) -> list[str]:
        """Return the engine requests that have not ended yet."""
        indices = (index for index in range(self.message.n) if index not in self.choices)
        return [choice_id(self.message.request_id, index) for index in indices]


class PrefillHandler(RoleHandler):
    """One engine request per choice, each limited to one token. The first computes the prompt, the others hit its blocks.

    Only the last choice keeps its blocks, after all others have their tokens. Blocks kept earlier would be held while other
    choices wait for blocks: requests could wait for each other, and leases could expire before the router knows of them.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._live: dict[str, _Prefill] = {}
        self._transfer_ids: OrderedDict[str, str] = OrderedDict()  # request id → transfer id of its handoff

    def on_generate(self, message: Generate, now: float) -> list[NewRequest]:
        """Request the first token of the first choice.

        Raises:
            InvalidRequest: the request is not one for a prefill worker.
        """
        if not message.handoff or message.kv_handoff is not None or message.choices:
            raise InvalidRequest("a prefill worker only takes requests that are handed over after the first token")
        # One token ends every choice, so a longer minimum only means that it must not be a stop token.
        sampling = msgspec.structs.replace(message.sampling, max_tokens=1, min_tokens=min(1, message.sampling.min_tokens))
        without_prompt = msgspec.structs.replace(sampling, prompt_logprobs=None)
        requests = [
            request_of_choice(message, index, without_prompt if index else sampling, self._facts, now)
            for index in range(message.n)
        ]
        requests[-1] = replace(requests[-1], needs_handoff=True)
        requests[0] = replace(requests[0], announces=message.announces)  # it computes the prompt
        first, *waves = [wave for wave in (requests[:1], requests[1:-1], requests[1:][-1:]) if wave]
        self._live[message.request_id] = _Prefill(message, now, waves)
        return first

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> RoleOutput:
        """Collect first tokens; answer when every choice has its own."""
        result = RoleOutput()
        for output in outputs:
            request_id, index = split_choice_id(output.request_id)
            prefill = self._live.get(request_id)
            if prefill is None:
                if output.kv_handoff is not None:  # aborted in the meantime: no worker will read it
                    result.release_transfer_ids.append(output.kv_handoff.transfer_id)
            elif output.sealed_prefix is not None:
                result.replies.append(_progress(request_id, output.sealed_prefix))
            else:
                self._on_output(prefill, index, output, now, result)
        return result

    def on_abort(self, request_id: str) -> RoleOutput:
        """Stop computing, or release the blocks if the answer is already on its way."""
        prefill = self._live.pop(request_id, None)
        transfer_id = self._transfer_ids.pop(request_id, None)
        return RoleOutput(
            abort_ids=prefill.choice_ids() if prefill is not None else [],
            release_transfer_ids=[transfer_id] if transfer_id is not None else [],
        )

    def _on_output(self, prefill: _Prefill, index: int, output: EngineCoreOutput, now: float, result: RoleOutput) -> None:
        self._collect(prefill, index, output)
        error = output_error(output)
        if error is not None:
            self._fail(prefill, index, error, result)
        elif len(prefill.choices) == prefill.message.n:
            self._answer(prefill, now, result)
        elif len(prefill.choices) == prefill.num_begun:
            wave = prefill.waves.pop(0)
            prefill.num_begun += len(wave)
            result.new_requests += wave

    def _collect(self, prefill: _Prefill, index: int, output: EngineCoreOutput) -> None:
        if output.kv_handoff is not None:
            prefill.kv_handoff = output.kv_handoff
        if output.prompt_logprobs is not None:
            prefill.prompt_logprobs = output.prompt_logprobs
        if index == 0 and output.prefill_stats is not None:
            prefill.num_cached_tokens = output.prefill_stats.num_cached_tokens
            prefill.queue_ms = output.prefill_stats.queue_s * 1e3
        if output.transfer_usage is not None:
            if output.transfer_usage.transferred_tokens and prefill.kv_transfer is None:
                prefill.kv_transfer = output.transfer_usage
            prefill.recomputed_tokens += output.transfer_usage.recomputed_tokens
            prefill.fallback_reason = prefill.fallback_reason or output.transfer_usage.fallback_reason
        if not output.new_token_ids:
            return
        prefill.choices[index] = PrefillChoice(
            index=index,
            token_id=output.new_token_ids[0],
            logprobs=output.logprobs[0] if output.logprobs else None,
            finish_reason=self._finish_reason(prefill.message, output),
            stop_reason=output.stop_reason,
        )

    def _finish_reason(self, message: Generate, output: EngineCoreOutput) -> FinishReason | None:
        """Return why the choice has ended for the client, None if a decode worker continues it."""
        if output.finish_reason == "stop":
            return "stop"
        is_full = len(message.prompt_token_ids) + 1 >= self._facts.max_model_len
        return "length" if message.sampling.max_tokens == 1 or is_full else None

    def _answer(self, prefill: _Prefill, now: float, result: RoleOutput) -> None:
        request_id, handoff = prefill.message.request_id, prefill.kv_handoff
        choices = tuple(prefill.choices[index] for index in range(prefill.message.n))
        if handoff is not None and all(choice.finish_reason is not None for choice in choices):
            result.release_transfer_ids.append(handoff.transfer_id)
            handoff = None
        if handoff is not None:
            self._remember(request_id, handoff.transfer_id)
        total_ms = (now - prefill.arrival_time) * 1e3
        result.replies.append(
            PrefillDone(
                request_id=request_id,
                choices=choices,
                kv_handoff=handoff,
                prompt_logprobs=prefill.prompt_logprobs,
                num_cached_tokens=prefill.num_cached_tokens,
                queue_ms=prefill.queue_ms,
                prefill_ms=max(0.0, total_ms - prefill.queue_ms),
                recomputed_tokens=prefill.recomputed_tokens,
                fallback_reason=prefill.fallback_reason,
                kv_transfer=prefill.kv_transfer,
            )
        )
        result.ended.append(request_id)
        del self._live[request_id]

    def _remember(self, request_id: str, transfer_id: str) -> None:
        self._transfer_ids[request_id] = transfer_id
        if len(self._transfer_ids) > MAX_REMEMBERED_HANDOFFS:
            self._transfer_ids.popitem(last=False)

    def _fail(self, prefill: _Prefill, index: int, error: ErrorInfo, result: RoleOutput) -> None:
        """Fail the request because of one choice, as the client gets all choices or an error."""
        request_id = prefill.message.request_id
        failed = choice_id(request_id, index)
        result.abort_ids += [engine_id for engine_id in prefill.choice_ids() if engine_id != failed]
        if prefill.kv_handoff is not None:
            result.release_transfer_ids.append(prefill.kv_handoff.transfer_id)
        result.replies.append(RequestFailed(request_id=request_id, error=error))
        result.ended.append(request_id)
        del self._live[request_id]


def _progress(request_id: str, prefix: SealedPrefix) -> PrefillProgress:
    return PrefillProgress(
        request_id=request_id, kv_handoff=prefix.handoff, first_token=prefix.first_token, ready_ms=1e3 * prefix.ready_s
    )
