"""The messages between the parts of prefix pulls: scheduler sides on the engine threads, and machines in the event loops.

A reader's scheduler side orders ``AskPrefix`` and gets ``PrefixAnswered``. A source's event loop passes a question on to its
engine as ``PrefixAsked``, since only the engine knows its blocks, and gets ``PrefixFound`` or ``PrefixNotFound`` back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from core.wire.kv import ControlMessage, KVHandoff, KVSource, PrefixQuestion

# Why a prefix is not pulled. By the source: it has restarted, has another model, has blocks of another size for a model with
# windows, holds nothing of it, has no blocks to spare, keeps as many for readers as it may, has too many questions. By the
# reader: no answer in time, the source is lost, its answer is not one to this question.
PrefixRefusal = Literal[
    "restarted", "model", "layout", "missing", "pressure", "limit", "busy", "deadline", "peer_lost", "invalid"
]
PREFIX_REFUSALS: tuple[PrefixRefusal, ...] = (
    "restarted",
    "model",
    "layout",
    "missing",
    "pressure",
    "limit",
    "busy",
    "deadline",
    "peer_lost",
    "invalid",
)


# ---- reader ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskPrefix:
    """Ask a source for the beginning of a request's prompt. ``block_size`` and ``chain`` are those of ``PrefixQuestion``."""

    request_id: str
    source: KVSource
    block_size: int
    chain: bytes
    patience_s: float


@dataclass(frozen=True, slots=True)
class CancelPrefixAsk:
    """The request no longer waits for an answer."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PrefixUnused:
    """The request had no blocks before the deadline of its answer. The handoff is released."""

    request_id: str


@dataclass(frozen=True, slots=True)
class PrefixAnswered:
    """The end of a question: a handoff, or why there is none. Reported once for each ``AskPrefix`` that is not cancelled.

    A load must end by ``deadline``, on this worker's clock. The answer took ``asked_s`` seconds.
    """

    request_id: str
    handoff: KVHandoff | None
    refusal: PrefixRefusal | None
    deadline: float
    asked_s: float


@dataclass(frozen=True, slots=True)
class PrefixExpired:
    """The deadline of an answer with a handoff has come, and no load from it has ended. Reported once; wakes the engine."""

    request_id: str


# ---- source ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefixAsked:
    """A question, and the connection that it came by."""

    sender: bytes
    question: PrefixQuestion


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """The engine holds these blocks for a reader, until ``PinEnded`` or ``PinsFreed``."""

    asked: PrefixAsked
    handoff: KVHandoff
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixNotFound:
    """The engine holds nothing for this question."""

    asked: PrefixAsked
    refusal: PrefixRefusal


@dataclass(frozen=True, slots=True)
class PinsFreed:
    """The engine has freed these pins early, since it needs the blocks."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PinEnded:
    """The lease of a pin is over: the engine frees its blocks."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class AnswerTo:
    """Send an answer by the connection of its question."""

    sender: bytes
    message: ControlMessage


# What event loops tell their engines.
PrefixReport = PrefixAnswered | PrefixExpired | PrefixAsked | PinEnded
