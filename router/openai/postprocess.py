"""Turns the tokens of a request's choices into text: detokenization, stop strings, held-back text, and the counts of ``usage``.

Owns the state of all choices of one HTTP request. ``router.openai.responses`` gives the output its JSON shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from core.model.detokenizer import IncrementalDetokenizer, StopStringMatcher, StopStrings
from core.model.tokenizer import Tokenizer
from core.wire.messages import ErrorInfo, FinishReason, TokenLogprobs
from router.dispatch.timing import HandoffReport
from router.dispatch.types import ChoiceUpdate, PromptReport, Update
from router.openai.preprocess import Prompt
from router.openai.sampling import OutputOptions


@dataclass(slots=True)
class Delta:
    """New output of a choice. ``index`` counts over all prompts of the request. ``logprobs`` only if requested.

    ``offsets`` has the start of each token's text, in characters of the choice's text.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, later: Delta) -> None:
        """Append a later delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class PromptState:
    """One prompt of the request and the reports of its workers."""

    prompt: Prompt
    report: PromptReport | None = None
    handoff: HandoffReport | None = None

    def take(self, report: PromptReport) -> None:
        """Keep a report; one that is not the first only completes the first."""
        if self.report is None or report.is_first:
            self.report = report
        else:
            self.report = replace(self.report, num_cached_tokens=report.num_cached_tokens)


class ChoiceText:
    """The output of one choice as text."""

    def __init__(
        self, tokenizer: Tokenizer, options: OutputOptions, stops: StopStrings, prompt_token_ids: Sequence[int]
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopStringMatcher(stops, include_stop_str_in_output=options.include_stop_str)
        self._options = options
        self._has_stops = bool(stops.texts)
        self._eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self._num_characters = 0  # in the tokens so far, without an incomplete character at the end
        self.num_tokens = 0
        self.is_finished = False

    def push(self, update: ChoiceUpdate, index: int) -> Delta:
        """Return the new output of an update. A stop string ends the choice, and the text after it is dropped."""
        delta = Delta(index)
        if self._options.is_echo_only:  # the worker always samples one token; the client does not want it
            return self._finish(delta, "length", None)
        hidden_stop = update.finish_reason == "stop" and not self._options.include_stop_str
        for number, token_id in enumerate(update.token_ids):
            self.num_tokens += 1
            delta.token_ids.append(token_id)
            delta.offsets.append(self._num_characters)
            if update.logprobs is not None:
                delta.logprobs.append(update.logprobs[number])
            is_stop_token = hidden_stop and number == len(update.token_ids) - 1
            stop = None if is_stop_token else self._add(self._detokenizer.push((token_id,)), delta)
            if stop is not None:
                return self._finish(delta, "stop", stop)
        if update.finish_reason is None:
            return delta
        stop = self._add(self._detokenizer.flush(is_cut=update.finish_reason == "length"), delta)
        if stop is not None:
            return self._finish(delta, "stop", stop)
        delta.text += self._stops.flush()
        return self._finish(delta, update.finish_reason, self._stop_reason(update.stop_reason))

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that end nothing, of a choice without stop strings."""
        self.num_tokens += len(token_ids)
        text = self._detokenizer.push(token_ids)
        self._num_characters += len(text)
        return text

    def _add(self, text: str, delta: Delta) -> str | None:
        """Add text to the delta, except what may begin a stop string; return the stop string that it completes."""
        self._num_characters += len(text)
        if not self._has_stops:
            delta.text += text
            return None
        safe, stop = self._stops.push(text, may_end=self.num_tokens > self._options.min_tokens)
        delta.text += safe
        return stop

    def _finish(self, delta: Delta, reason: FinishReason, stop_reason: int | str | None) -> Delta:
        self.is_finished = True
        delta.finish_reason, delta.stop_reason = reason, stop_reason
        return delta

    def _stop_reason(self, token_id: int | None) -> int | None:
        """Return the client's stop token that ended the choice; None for the model's end-of-sequence token."""
        if token_id in self._eos_token_ids and token_id not in self._options.stop_token_ids:
            return None
        return token_id


class RequestOutput:
    """All choices of one HTTP request: ``n`` for each of its prompts, numbered prompt by prompt."""

    def __init__(self, tokenizer: Tokenizer, options: OutputOptions, prompts: Sequence[Prompt], n: int) -> None:
        self.prompts = [PromptState(prompt) for prompt in prompts]
        self._n = n
        self.has_stops = bool(options.stop)
        stops = StopStrings(options.stop)
        self._choices = [ChoiceText(tokenizer, options, stops, prompt.token_ids) for prompt in prompts for _ in range(n)]

    @property
    def is_finished(self) -> bool:
        """True once every choice has ended."""
        return all(choice.is_finished for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all prompts."""
        return sum(len(state.prompt.token_ids) for state in self.prompts)

    @property
    def num_completion_tokens(self) -> int:
        """Output tokens of all choices, including end-of-sequence and stop tokens."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens loaded from a cache, of all prompts."""
        return sum(state.report.num_cached_tokens for state in self.prompts if state.report)

    def prompt_of(self, index: int) -> PromptState:
        """Return the prompt that a choice belongs to."""
        return self.prompts[index // self._n]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the indices of a choice: of its prompt, and among the choices of this prompt."""
        return divmod(index, self._n)

    def push_plain(self, index: int, token_ids: Sequence[int]) -> str:
        """Return the text of tokens that end nothing, of a choice without stop strings: ``apply`` without what is not text."""
        return self._choices[index].push_plain(token_ids)

    def apply(self, updates: Iterable[tuple[int, Update]]) -> tuple[list[Delta], list[int], ErrorInfo | None]:
        """Apply updates; return a delta for each piece of output, the choices ended by a stop string, and the error, if any.

        After an error choices stay unfinished, and no further update may be applied.
        """
        deltas: list[Delta] = []
        stopped: list[int] = []
        for prompt_index, update in updates:
            if update.error is not None:
                return deltas, stopped, update.error
            state = self.prompts[prompt_index]
            if update.prompt is not None:
                state.take(update.prompt)
            state.handoff = update.handoff or state.handoff
            for item in update.choices:
                index = prompt_index * self._n + item.index
                choice = self._choices[index]
                if choice.is_finished:
                    continue
                delta = choice.push(item, index)
                if delta.finish_reason is not None and item.finish_reason is None:
                    stopped.append(index)
                deltas.append(delta)
        return deltas, stopped, None
