"""The prefill role of an agent: a prompt is computed for a decode engine, which samples all tokens itself.

So sampling, penalties, logprobs and structured output begin where they go on. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.errors import InvalidRequest
from core.request import EngineCoreOutput, NewRequest
from core.wire.messages import Generate, PrefillDone, RequestFailed
from core.worker.role import EngineFacts, RoleHandler, RoleOutput, choice_id, output_error, request_of_choice, split_choice_id


class VllmPrefillHandler(RoleHandler):
    """One engine request per prompt, for all of its choices."""

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self._arrivals: dict[str, float] = {}

    def on_generate(self, message: Generate, now: float) -> list[NewRequest]:
        """Begin a prompt.

        Raises:
            InvalidRequest: the request is not one for a prefill worker.
        """
        if not message.handoff or message.choices:
            raise InvalidRequest("a prefill worker computes prompts for others only", param="handoff")
        self._arrivals[message.request_id] = now
        request = request_of_choice(message, 0, message.sampling, self._facts, now)
        return [replace(request, needs_handoff=True)]

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> RoleOutput:
        """Answer prompts that are computed."""
        result = RoleOutput()
        for output in outputs:
            request_id, _ = split_choice_id(output.request_id)
            arrival = self._arrivals.pop(request_id, None)
            if arrival is None:
                if output.kv_handoff is not None:  # aborted in the meantime: no engine will read it
                    result.release_transfer_ids.append(output.kv_handoff.transfer_id)
                continue
            result.ended.append(request_id)
            error = output_error(output)
            if error is not None:
                result.replies.append(RequestFailed(request_id=request_id, error=error))
                continue
            num_cached = output.late_cached_tokens
            result.replies.append(
                PrefillDone(
                    request_id=request_id,
                    choices=(),
                    kv_handoff=output.kv_handoff,
                    prompt_logprobs=output.prompt_logprobs,
                    num_cached_tokens=num_cached or 0,
                    tells_hits=num_cached is not None,
                    prefill_ms=max(0.0, (now - arrival) * 1e3),
                )
            )
        return result

    def on_abort(self, request_id: str) -> RoleOutput:
        """End a prompt that is being computed."""
        if self._arrivals.pop(request_id, None) is None:
            return RoleOutput()
        return RoleOutput(abort_ids=[choice_id(request_id, 0)])
