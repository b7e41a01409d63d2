"""Writes the output of one response: items in the order in which the model makes them, and the events that tell of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET

from router.openai.chat_output import ChatPart, ToolCall
from router.responses_api.bodies import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    FunctionCallItem,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    TextDeltaEvent,
    TextDoneEvent,
)


@dataclass(slots=True)
class _Writing:
    """The item that is being written. A call has a name, and a message or reasoning has not."""

    id: str
    is_reasoning: bool = False
    call_id: str = ""
    name: str = ""
    call_index: int = -1
    pieces: list[str] = field(default_factory=list)

    def item(self, status: ItemStatus, *, is_new: bool = False) -> OutputItem:
        text = "".join(self.pieces)
        if self.name:
            return FunctionCallItem(id=self.id, call_id=self.call_id, name=self.name, arguments=text, status=status)
        if self.is_reasoning:
            return ReasoningItem(id=self.id, content=[] if is_new else [ReasoningText(text=text)], status=status)
        return MessageItem(id=self.id, content=[] if is_new else [OutputText(text=text)], status=status)

    def part(self) -> OutputText | ReasoningText:
        text = "".join(self.pieces)
        return ReasoningText(text=text) if self.is_reasoning else OutputText(text=text)


class ItemWriter:
    """The items of one response. ``answer_id`` makes their ids unique."""

    def __init__(self, answer_id: str) -> None:
        self._answer_id = answer_id
        self._done: list[OutputItem] = []
        self._open: _Writing | None = None

    def items(self) -> list[OutputItem]:
        """Return the items so far, with the one that is being written."""
        return [*self._done, *([self._open.item("incomplete")] if self._open is not None else [])]

    def add(self, part: ChatPart) -> list[ResponseEvent]:
        """Add new output; return its events."""
        events: list[ResponseEvent] = []
        if part.reasoning:
            self._add_text(part.reasoning, events, is_reasoning=True)
        if part.text:
            self._add_text(part.text, events, is_reasoning=False)
        for call in part.calls:
            self._add_call(call, events)
        return events

    def finish(self, status: ItemStatus, *, of_call: ItemStatus) -> list[ResponseEvent]:
        """End the last item with ``status``, or with ``of_call`` if it is one; an output without any is an empty message."""
        events: list[ResponseEvent] = []
        if self._open is None and not self._done:
            self._begin(_Writing(self._new_id("msg")), events)
        is_call = self._open is not None and bool(self._open.name)
        self._end(of_call if is_call else status, events)
        return events

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._answer_id}_{len(self._done)}"

    def _add_text(self, text: str, events: list[ResponseEvent], *, is_reasoning: bool) -> None:
        writing = self._open
        if writing is None or writing.name or writing.is_reasoning != is_reasoning:
            self._end("completed", events)
            writing = _Writing(self._new_id("rs" if is_reasoning else "msg"), is_reasoning)
            self._begin(writing, events)
        writing.pieces.append(text)
        events.append(
            TextDeltaEvent(
                type="response.reasoning_text.delta" if is_reasoning else "response.output_text.delta",
                item_id=writing.id,
                output_index=len(self._done),
                delta=text,
            )
        )

    def _add_call(self, call: ToolCall, events: list[ResponseEvent]) -> None:
        writing = self._open
        index = call.index if call.index is not UNSET else -1
        if writing is None or not writing.name or writing.call_index != index:
            self._end("completed", events)
            call_id, name = (value if value is not UNSET else "" for value in (call.id, call.function.name))
            writing = _Writing(self._new_id("fc"), call_id=call_id, name=name, call_index=index)
            self._begin(writing, events)
        if call.function.arguments:
            writing.pieces.append(call.function.arguments)
            events.append(ArgumentsDeltaEvent(item_id=writing.id, output_index=len(self._done), delta=call.function.arguments))

    def _begin(self, writing: _Writing, events: list[ResponseEvent]) -> None:
        self._open, index = writing, len(self._done)
        item = writing.item("in_progress", is_new=True)
        events.append(ItemEvent(type="response.output_item.added", output_index=index, item=item))
        if not writing.name:
            part = writing.part()
            events.append(PartEvent(type="response.content_part.added", item_id=writing.id, output_index=index, part=part))

    def _end(self, status: ItemStatus, events: list[ResponseEvent]) -> None:
        writing, index = self._open, len(self._done)
        if writing is None:
            return
        text = "".join(writing.pieces)
        if writing.name:
            events.append(ArgumentsDoneEvent(item_id=writing.id, output_index=index, name=writing.name, arguments=text))
        else:
            events += [
                TextDoneEvent(
                    type="response.reasoning_text.done" if writing.is_reasoning else "response.output_text.done",
                    item_id=writing.id,
                    output_index=index,
                    text=text,
                ),
                PartEvent(type="response.content_part.done", item_id=writing.id, output_index=index, part=writing.part()),
            ]
        item = writing.item(status)
        events.append(ItemEvent(type="response.output_item.done", output_index=index, item=item))
        self._done.append(item)
        self._open = None
