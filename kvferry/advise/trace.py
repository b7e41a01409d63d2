"""Reads the requests of a trace: Mooncake's format, or the log of a router.

Owns both formats and what is refused in them. A Mooncake trace has one JSON object a line with ``timestamp`` (ms),
``input_length``, ``output_length`` (tokens) and ``hash_ids``, one id for each 512 tokens of the prompt; equal ids are equal
prefixes. Of a router's log the lines ``event=finished`` count, as text or JSON; they do not tell which prompts share prefixes.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from core.errors import ConfigError
from core.log import shorten

BLOCK_TOKENS = 512  # of one id
MAX_REQUESTS = 1_000_000
MAX_LINE_BYTES = 4 << 20
MAX_BYTES = 1 << 30
_MAX_TOKENS = 100_000_000  # of one prompt or answer
_MAX_MS = 1e13  # since the beginning or 1970

_FIELD = re.compile(r'(?:^|\s)([a-z_]+)=("(?:[^"\\]|\\.)*"|\S+)')

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=_MAX_MS)]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: its arrival in ms, and the ids of the whole blocks of its prompt that another prompt can reuse."""

    arrival_ms: float
    num_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests in order of arrival, the first one at 0. ``knows_prefixes`` is False for a router's log."""

    requests: tuple[TraceRequest, ...]
    knows_prefixes: bool

    @property
    def span_ms(self) -> float:
        """The time from the first to the last arrival."""
        return self.requests[-1].arrival_ms

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.requests) / self.span_ms * 1e3


class _MooncakeLine(msgspec.Struct):
    timestamp: _Milliseconds
    input_length: _Tokens
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]
    hash_ids: list[int] = []


class _FinishedLine(msgspec.Struct):
    ts: str
    prompt_tokens: _Tokens
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]
    total_ms: _Milliseconds


class _AnyLine(msgspec.Struct):
    event: str | None = None


def read_trace(path: Path) -> Trace:
    """Return the requests of a file, ``-`` for standard input.

    Raises:
        ConfigError: the file cannot be read, or is no trace; names the line.
    """
    if str(path) == "-":
        return _parse(sys.stdin.buffer, "standard input")
    name = shorten(ascii(str(path))[1:-1], 200)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"the trace {name} is not a file; - reads standard input", param="trace")
        with path.open("rb") as file:
            return _parse(file, name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "the path is not valid"
        raise ConfigError(f"cannot read the trace {name}: {reason}", param="trace") from None


def spread_arrivals(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Spread the requests of one timestamp uniformly until the next timestamp: published traces are quantised.

    The last group is spread over the median distance of two timestamps.
    """
    stamps = sorted({request.arrival_ms for request in requests})
    gaps = sorted(after - before for before, after in itertools.pairwise(stamps))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    width = {stamp: min(after - stamp, usual) for stamp, after in zip(stamps, [*stamps[1:], stamps[-1] + usual], strict=True)}
    source = random.Random(seed)
    spread = (
        replace(request, arrival_ms=request.arrival_ms + source.random() * width[request.arrival_ms]) for request in requests
    )
    return sorted(spread, key=lambda request: request.arrival_ms)


def _parse(file: BinaryIO, name: str) -> Trace:
    found: list[TraceRequest] = []
    is_mooncake: bool | None = None
    number, num_bytes = -1, 0
    try:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")):  # noqa: B007 - the error's line
            num_bytes += len(line)
            _check_size(line, num_bytes)
            if not line.strip():
                continue
            if is_mooncake is None:
                is_mooncake = _is_mooncake(line)
            request = _mooncake_request(line) if is_mooncake else _logged_request(line)
            if request is None:
                continue
            if is_mooncake and found and request.arrival_ms < found[-1].arrival_ms:
                raise ValueError(f"timestamp {request.arrival_ms:g} is before that of the request before it")
            found.append(request)
            if len(found) > MAX_REQUESTS:
                raise ValueError(f"more than {MAX_REQUESTS:,} requests: cut the trace")
    except ValueError as error:
        raise ConfigError(f"{name}, line {number + 1}: {shorten(str(error), 300)}", param="trace") from None
    if not found:
        raise ConfigError(f"{name}, line {max(1, number + 1)}: the trace has no requests", param="trace")
    found.sort(key=lambda request: request.arrival_ms)
    begin = found[0].arrival_ms
    if found[-1].arrival_ms <= begin:
        raise ConfigError(f"{name}, line {number + 1}: all requests have one timestamp, so they have no rate", param="trace")
    return Trace(tuple(replace(request, arrival_ms=request.arrival_ms - begin) for request in found), bool(is_mooncake))


def _check_size(line: bytes, num_bytes: int) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
    if num_bytes > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes: cut the trace")


def _is_mooncake(line: bytes) -> bool:
    try:
        return msgspec.json.decode(line, type=_AnyLine).event is None
    except msgspec.MsgspecError:
        if b"event=" in line or b"ts=" in line:
            return False
        raise ValueError("neither a request of a Mooncake trace nor a line of a router's log") from None


def _mooncake_request(line: bytes) -> TraceRequest:
    found = msgspec.json.decode(line, type=_MooncakeLine)
    reusable = found.hash_ids[: (found.input_length - 1) // BLOCK_TOKENS]  # a partial last block cannot be reused
    return TraceRequest(found.timestamp, found.input_length, max(1, found.output_length), tuple(reusable))


def _logged_request(line: bytes) -> TraceRequest | None:
    """Return the request of a line ``event=finished``, None for other lines."""
    if b"finished" not in line:
        return None
    if line.lstrip().startswith(b"{"):
        if msgspec.json.decode(line, type=_AnyLine).event != "finished":
            return None
        found = msgspec.json.decode(line, type=_FinishedLine)
    else:
        fields = dict(_FIELD.findall(line.decode()))
        if fields.get("event") != "finished" or "prompt_tokens" not in fields:
            return None  # other events, and the workers' own
        found = msgspec.convert(fields, type=_FinishedLine, strict=False)
    arrival_ms = datetime.fromisoformat(found.ts).timestamp() * 1e3 - found.total_ms
    if not math.isfinite(arrival_ms):
        raise ValueError("the time is not a number")
    return TraceRequest(arrival_ms, found.prompt_tokens, max(1, found.output_tokens))
