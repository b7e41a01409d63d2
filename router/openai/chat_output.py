"""Splits the text of a chat's choices into reasoning, answer and tool calls, whole or part by part."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from core.wire.sampling import StructuredOutput
from router.openai.postprocess import Delta
from router.openai.tool_choice import ToolUse
from router.tools.form_or_calls import FormOrCallsParser
from router.tools.formats import REQUIRED, ToolFormat
from router.tools.output import CallStart, Piece, ToolParser
from router.tools.reasoning import CLOSE, OPEN, NamedArgumentsParser, ReasoningParser


class CalledFunction(msgspec.Struct, kw_only=True):
    """A function's name, in its first part only, and JSON text of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call, or a part of it; ``index`` in streams only, ``id`` and ``type`` in the first part only."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


@dataclass(slots=True)
class ChatPart:
    """New output of a choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None

    def __bool__(self) -> bool:
        """True if there is anything that the client sees."""
        return bool(self.text or self.reasoning or self.calls or self.finish_reason)


@dataclass(slots=True)
class _Choice:
    reasoning: ReasoningParser | None
    tools: ToolParser | None
    num_calls: int = 0
    drops_calls: bool = False  # those after the first

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, none of which a stop string or the end of the text has cut."""
        is_cut = self.tools is not None and self.tools.is_in_call and not self.drops_calls
        return self.num_calls > 0 and not is_cut


@dataclass(slots=True, kw_only=True)
class ChatOutput:
    """How the output of a chat is split. Holds the state of all choices. ``answer_id`` makes ids of calls unique."""

    tools: ToolUse | None
    format: ToolFormat
    has_reasoning: bool  # thinking tags are split off
    is_reasoning_open: bool  # by the prompt
    shows_reasoning: bool
    form: StructuredOutput | None = None  # the answer is of it, or calls tools
    answer_id: str = ""
    _choices: dict[int, _Choice] = field(default_factory=dict)

    @property
    def splits(self) -> bool:
        """False if all output is text of the answer."""
        return self.tools is not None or self.has_reasoning

    @property
    def needs_special_tokens(self) -> bool:
        """True if the parser needs the special tokens of the text."""
        return self.tools is not None and self.tools.form is None and self.format.shows_special_tokens

    def part(self, delta: Delta) -> ChatPart:
        """Return what a delta adds to its choice."""
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = self._new_choice()
        is_end = delta.finish_reason is not None
        part = ChatPart(text=delta.text, finish_reason=delta.finish_reason)
        if choice.reasoning is not None:
            part.reasoning, part.text = choice.reasoning.push(delta.text)
            if is_end:
                reasoning, text = choice.reasoning.finish()
                part.reasoning, part.text = part.reasoning + reasoning, part.text + text
            part.reasoning = part.reasoning if self.shows_reasoning else ""
        if choice.tools is not None:
            pieces, part.text = choice.tools.push(part.text), ""
            for piece in pieces:
                self._add(piece, part, choice, delta.index)
            for piece in choice.tools.finish() if is_end else ():
                if not (isinstance(piece, str) and _is_cut(delta) and self._is_call(choice)):
                    self._add(piece, part, choice, delta.index)
            if delta.finish_reason == "stop" and not self._is_named and choice.has_whole_calls:
                part.finish_reason = "tool_calls"
        return part

    def num_reasoning_characters(self, index: int) -> int:
        """Return how many characters at the start of a choice's text are reasoning, with its tags."""
        choice = self._choices.get(index)
        return choice.reasoning.num_characters if choice is not None and choice.reasoning is not None else 0

    def ends_in_whole_call(self, index: int) -> bool:
        """Return True if the arguments of a choice's last call are known to be whole, although its text may be cut behind."""
        choice = self._choices.get(index)
        return choice is not None and choice.has_whole_calls and not self._is_named

    @property
    def _is_named(self) -> bool:
        return self.tools is not None and self.tools.choice == "named"

    def _is_call(self, choice: _Choice) -> bool:
        """Return True if what is held back at a cut end of the text can only be a call, or is one that would be dropped."""
        if isinstance(choice.tools, FormOrCallsParser):
            return choice.tools.has_calls
        return choice.num_calls > 0 and self.tools is not None and not self.tools.is_parallel

    def _new_choice(self) -> _Choice:
        reasoning = ReasoningParser(is_open=self.is_reasoning_open) if self.has_reasoning else None
        return _Choice(reasoning, self._new_parser(self.tools) if self.tools is not None else None)

    def _new_parser(self, tools: ToolUse) -> ToolParser:
        if tools.choice == "named":
            return NamedArgumentsParser(tools.named)
        if tools.choice == "required":
            return REQUIRED.parser()
        parser = self.format.parser()
        if self.form is None:
            return parser
        openings = [opening for syntax in self.format.syntaxes for opening in syntax.openings(list(tools.schemas))]
        return FormOrCallsParser(openings, parser, form=self.form)

    def _add(self, piece: Piece, part: ChatPart, choice: _Choice, index: int) -> None:
        if isinstance(piece, str):
            part.text += piece
            return
        if piece.index and self.tools is not None and not self.tools.is_parallel:
            choice.drops_calls = True
            return
        if isinstance(piece, CallStart):
            choice.num_calls += 1
            function = CalledFunction(name=piece.name)
            part.calls.append(
                ToolCall(index=piece.index, id=self._call_id(index, piece.index), type="function", function=function)
            )
        elif part.calls and part.calls[-1].index == piece.index:
            part.calls[-1].function.arguments += piece.text
        else:
            part.calls.append(ToolCall(index=piece.index, function=CalledFunction(arguments=piece.text)))

    def _call_id(self, choice: int, call: int) -> str:
        digest = hashlib.blake2b(f"{self.answer_id}/{choice}/{call}".encode(), digest_size=12).hexdigest()
        length = self.format.num_id_letters
        return digest[:length] if length else f"call_{digest}"


def _is_cut(delta: Delta) -> bool:
    """Return True if ``max_tokens`` or a stop string has ended the text, and not the model."""
    return delta.finish_reason == "length" or isinstance(delta.stop_reason, str)


def has_thinking_tags(template: str) -> bool:
    """Return True if a chat template knows thinking tags."""
    return OPEN in template or CLOSE in template


def opens_reasoning(prompt: str, continued: str = "") -> bool:
    """Return True if a prompt ends in reasoning: with its start, or within the text of the message that is continued."""
    return prompt.rstrip().endswith(OPEN) or (continued.lstrip().startswith(OPEN) and CLOSE not in continued)
