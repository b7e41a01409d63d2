"""The process in which a grammar is compiled first, so that one that takes too long or too much memory can be killed.

Reads length-prefixed msgpack from its standard input, ``Setup`` and then ``Check`` messages, and answers each ``Check`` with a
``Checked``. Ends at the end of its input. Its own alarms end it at the deadline of a check even if its parent is gone.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from typing import IO

import msgspec

from core.errors import InvalidRequest
from core.grammar.compiled import CompiledGrammar, Vocabulary
from core.wire.sampling import StructuredOutput

MEMORY_BYTES = 2 << 30  # of address space beyond what it has at its start, at most
_MIN_MEMORY_BYTES = 512 << 20  # less would refuse usual grammars
_CONTAINER_SHARE = 0.5  # of the container's memory; the rest is its other processes'
_CONTAINER_LIMIT = "/sys/fs/cgroup/memory.max"
WALL_FACTOR = 4.0  # a busy machine gives the process a part of its time
_NICENESS = 5  # the engine goes first
_LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The vocabulary: ``tokenizer.json``, the number of logits, the end-of-text tokens."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compile this within ``timeout_s`` of CPU time, and find its first tokens."""

    output: StructuredOutput
    timeout_s: float


class Checked(msgspec.Struct, frozen=True):
    """``error`` is empty if the grammar can be used, else what the client is to change."""

    error: str = ""


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Return the next frame; None at the end of the stream."""
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "little")
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write one frame."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    stream.flush()


def main() -> None:
    """Serve checks until the input ends."""
    os.nice(_NICENESS)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(Setup | Check)
    vocabulary: Vocabulary | None = None
    unusable = ""
    while (frame := read_frame(requests)) is not None:
        message = decoder.decode(frame)
        if isinstance(message, Setup):
            try:
                vocabulary = Vocabulary(message.tokenizer_json, message.vocab_size, message.eos_token_ids)
            except InvalidRequest as error:
                unusable = error.message
            _limit_memory()
            continue
        _set_alarms(message.timeout_s)
        write_frame(answers, Checked(unusable or _check(message.output, vocabulary)))
        _set_alarms(0)


def _check(output: StructuredOutput, vocabulary: Vocabulary | None) -> str:
    assert vocabulary is not None, "the vocabulary comes first"
    try:
        matcher = CompiledGrammar(output, vocabulary).start()
    except InvalidRequest as error:
        return error.message
    matcher.allowed()
    if matcher.error is None:
        return ""
    return f"{output.kind} is not supported: {matcher.error.message.removeprefix('structured output: ')}"


def _set_alarms(timeout_s: float) -> None:
    """End the process after this CPU time, or after ``WALL_FACTOR`` times as long by the clock; 0 = not."""
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * timeout_s)


def memory_bytes(limit_file: str = _CONTAINER_LIMIT) -> int:
    """Return the bytes that grammars may take: so few that this limit is met before the container's.

    The kernel kills the process at the latter, which would not tell whether the grammar is the reason.
    """
    try:
        with open(limit_file) as file:
            text = file.read().strip()
    except OSError:
        return MEMORY_BYTES
    if not text.isdecimal():  # "max"
        return MEMORY_BYTES
    return max(_MIN_MEMORY_BYTES, min(MEMORY_BYTES, int(_CONTAINER_SHARE * int(text))))


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    allowed = used + memory_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the parent is gone
        main()
