"""The decode role, and the aggregated one: generate tokens, after loading the prompt's KV cache or computing it here.

Owns the bookkeeping of requests between ``Generate`` and their last ``Tokens``: positions, usage, and which choices are live.
Knows nothing of sockets or transfers: the worker process carries the messages, the connector loads the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from core.errors import InvalidRequest
from core.request import EngineCoreOutput, FirstTokenTimes, NewRequest, PrefillStats
from core.wire.early import PullEarly
from core.wire.messages import ChoiceStart, Generate, RequestFailed, Tokens, TransferUsage, Usage
from core.worker.role import (
    EngineFacts,
    RoleHandler,
    RoleOutput,
    choice_id,
    output_error,
    request_of_choice,
    split_choice_id,
)
from decode.early_pulls import AnnouncedEarlyPulls


@dataclass(slots=True)
class _Choice:
    """One live choice. ``position`` is the output index of its next token; ``usage`` is sent with the last ``Tokens``.

    ``transfer_usage`` is None if the request began here and no tier was read: then there is no transfer to account for.
    """

    position: int
    prefill_stats: PrefillStats | None = None
    transfer_usage: TransferUsage | None = None
    usage: Usage | None = None
    has_sent_usage: bool = False


class DecodeHandler(RoleHandler):
    """One engine request per live choice; every step's tokens go out at once.

    ``loads_once``: only the first choice loads a handoff; the others find its blocks in the engine's prefix cache. That is for
    an engine that releases a handoff when the requests that it knows of have loaded it: a later choice would come too late.
    """

    def __init__(self, facts: EngineFacts, *, loads_once: bool = False) -> None:
        self._facts = facts
        self._early = AnnouncedEarlyPulls()
        self._loads_once = loads_once
        self._live: dict[str, dict[int, _Choice]] = {}
        self._followers: dict[str, list[NewRequest]] = {}  # choices that wait for the first one's prompt

    def on_generate(self, message: Generate, now: float) -> list[NewRequest]:
        """Continue choices that a prefill worker has begun, from a handoff or by recomputing, or start all choices.

        Raises:
            InvalidRequest: the request is one for a prefill worker, names a choice twice, or names none of a handoff.
        """
        if message.handoff:
            raise InvalidRequest("a decode worker does not hand requests over")
        if message.kv_handoff is not None and not message.choices:
            raise InvalidRequest("kv_handoff without choices: a handoff comes with the first tokens", param="choices")
        starts = message.choices or tuple(ChoiceStart(index=index, output_token_ids=()) for index in range(message.n))
        cost = TransferUsage() if message.choices else None  # until the engine reports it
        choices = {start.index: _Choice(position=len(start.output_token_ids), transfer_usage=cost) for start in starts}
        if len(choices) < len(starts):
            raise InvalidRequest("a choice is named twice", param="choices")
        self._live[message.request_id] = choices
        early_pull = self._early.pop(message.request_id)
        without_prompt = msgspec.structs.replace(message.sampling, prompt_logprobs=None)
        requests = []
        for start in starts:
            sampling = message.sampling if start is starts[0] and message.kv_handoff is None else without_prompt
            request = request_of_choice(message, start.index, sampling, self._facts, now)
            requests.append(replace(request, output_token_ids=start.output_token_ids, early_pull=early_pull))
        if len(requests) == 1 or (message.kv_handoff is not None and not self._loads_once):
            return requests
        self._followers[message.request_id] = [replace(request, kv_handoff=None) for request in requests[1:]]
        return requests[:1]

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> RoleOutput:
        """Pass new tokens on; a failed choice fails its request."""
        result = RoleOutput()
        for output in outputs:
            request_id, index = split_choice_id(output.request_id)
            choices = self._live.get(request_id)
            if choices is None or index not in choices:
                continue
            error = output_error(output)
            if error is None:
                self._pass_on(request_id, index, output, result)
                result.new_requests += self._start_followers(request_id)
            else:
                result.abort_ids += [choice_id(request_id, other) for other in choices if other != index]
                result.replies.append(RequestFailed(request_id=request_id, error=error))
                choices.clear()
            self._end_if_empty(request_id, result)
        return result

    def on_pull_early(self, message: PullEarly, now: float) -> RoleOutput:
        """Read what a prefill worker has sealed of a prompt."""
        new = self._early.on_message(message, now)
        return RoleOutput(new_requests=[new] if new is not None else [])

    def on_timer(self, now: float) -> RoleOutput:
        """End the early pulls whose requests have not come."""
        return RoleOutput(abort_ids=self._early.pop_due(now))

    def next_timer(self) -> float | None:
        """Return when the next early pull is overdue."""
        return self._early.next_timer()

    def on_abort(self, request_id: str) -> RoleOutput:
        """Stop all live choices, and the early pull."""
        self._followers.pop(request_id, None)
        choices = self._live.pop(request_id, {})
        early = self._early.pop(request_id)
        return RoleOutput(abort_ids=[choice_id(request_id, index) for index in choices] + ([early] if early else []))

    def on_abort_choice(self, request_id: str, index: int) -> RoleOutput:
        """Stop one choice; the last one ends the request."""
        choices = self._live.get(request_id, {})
        if choices.pop(index, None) is None:
            return RoleOutput()
        result = RoleOutput(abort_ids=[choice_id(request_id, index)], new_requests=self._start_followers(request_id))
        self._end_if_empty(request_id, result)
        return result

    def _start_followers(self, request_id: str) -> list[NewRequest]:
        """Return the live choices that waited for the first one's prompt, once."""
        choices = self._live[request_id]
        return [new for new in self._followers.pop(request_id, ()) if new.choice_index in choices]

    def _end_if_empty(self, request_id: str, result: RoleOutput) -> None:
        """Forget a request without live choices."""
        if not self._live[request_id]:
            result.ended.append(request_id)
            del self._live[request_id]
            self._followers.pop(request_id, None)

    def _pass_on(self, request_id: str, index: int, output: EngineCoreOutput, result: RoleOutput) -> None:
        choices = self._live[request_id]
        choice = choices[index]
        self._learn_usage(choice, output)
        if not output.new_token_ids and output.finish_reason is None:
            return
        is_last = output.finish_reason is not None
        usage = choice.usage if is_last or not choice.has_sent_usage else None
        if output.prompt_logprobs is not None:
            usage = msgspec.structs.replace(usage or Usage(), prompt_logprobs=output.prompt_logprobs)
        result.replies.append(
            Tokens(
                request_id=request_id,
                index=index,
                position=choice.position,
                token_ids=tuple(output.new_token_ids),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=tuple(output.logprobs) if output.logprobs else None,
                usage=usage,
            )
        )
        choice.has_sent_usage = True
        choice.position += len(output.new_token_ids)
        if is_last:
            del choices[index]

    def _learn_usage(self, choice: _Choice, output: EngineCoreOutput) -> None:
        """Keep the first outputs' report about the prompt, to send it with the last tokens."""
        choice.prefill_stats = output.prefill_stats or choice.prefill_stats
        choice.transfer_usage = output.transfer_usage or choice.transfer_usage
        if output.first_token_times is not None and choice.transfer_usage is not None:
            choice.transfer_usage = _with_times(choice.transfer_usage, output.first_token_times)
        stats, transfer = choice.prefill_stats, choice.transfer_usage
        if stats is not None or transfer is not None:
            choice.usage = Usage(num_cached_tokens=stats.num_cached_tokens if stats is not None else 0, kv_transfer=transfer)
        if (late := output.late_cached_tokens) is not None:
            choice.usage = msgspec.structs.replace(choice.usage or Usage(), num_cached_tokens=late, is_late=True)


def _with_times(cost: TransferUsage, times: FirstTokenTimes) -> TransferUsage:
    """Add the times that the connector does not measure: the part of the wait that was no transfer, and the computation."""
    queue_ms = max(0.0, times.wait_s * 1e3 - cost.transfer_ms - cost.verify_ms)
    return msgspec.structs.replace(cost, queue_ms=queue_ms, first_step_ms=times.compute_s * 1e3)
