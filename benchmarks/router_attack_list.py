"""What hostile clients send to a router: the list of ``router_attack.py``, each entry as what a connection sends.

Knows nothing of routers. ``send`` sends one entry, in a process of its own, so that what it costs the sender is not measured,
and prints the statuses of the answers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MANY_CONNECTIONS = 3000
_PIECE_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 60.0
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Served:
    """What of the served model an attack can be made to fit."""

    vocab_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Attack:
    """``pieces`` are sent on each of ``num_connections``, which then wait for an answer; ``holds`` = and never ask anything."""

    name: str
    pieces: Callable[[Served], Iterator[bytes]]
    num_connections: int = 1
    holds: bool = False


def _post(path: str, body: bytes) -> Iterator[bytes]:
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    yield head.encode() + body


def _completion(**fields: object) -> Iterator[bytes]:
    return _post("/v1/completions", json.dumps({"max_tokens": 1, **fields}).encode())


def _repeated(path: str, before: bytes, item: bytes, number: int, after: bytes) -> Iterator[bytes]:
    return _post(path, before + b",".join([item] * number) + after)


def _text(path: str, field: str, num_bytes: int, unit: str = "word, ") -> Iterator[bytes]:
    return _post(path, json.dumps({field: unit * (num_bytes // len(unit))}, ensure_ascii=False).encode())


def _endless_header() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nhost: router\r\nx: "
    for _ in range(200):
        yield b"v" * _PIECE_BYTES


def _endless_headers() -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nhost: router\r\n"
    for _ in range(200):
        yield b"name: value\r\n" * (_PIECE_BYTES // 13)


def _sent_ahead() -> Iterator[bytes]:
    yield b"GET /ready HTTP/1.1\r\nhost: router\r\n\r\n" * 20_000


_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"

ATTACKS = (
    Attack("tokenize 1 MB", lambda served: _text("/tokenize", "prompt", _MB)),
    Attack("tokenize 4 MB", lambda served: _text("/tokenize", "prompt", 4 * _MB)),
    Attack("tokenize 11 MB", lambda served: _text("/tokenize", "prompt", 11 * _MB)),
    Attack("tokenize 1 MB, 8 times at once", lambda served: _text("/tokenize", "prompt", _MB), num_connections=8),
    Attack("completion of 600 kB of emoji", lambda served: _text(_COMPLETIONS, "prompt", 600_000, "\U0001f600")),
    Attack("detokenize 5 M ids", lambda served: _repeated("/detokenize", b'{"tokens":[', b"1", 5_000_000, b"]}")),
    Attack("detokenize 32 k ids", lambda served: _repeated("/detokenize", b'{"tokens":[', b"1", 32_000, b"]}")),
    Attack(
        "chat of 300,000 empty messages",
        lambda served: _repeated(_CHAT, b'{"messages":[', b'{"role":"user"}', 300_000, b"]}"),
    ),
    Attack(
        "chat of 4,096 messages",
        lambda served: _repeated(_CHAT, b'{"max_tokens":1,"messages":[', b'{"role":"user"}', 4096, b"]}"),
    ),
    Attack("completion of 5 M ids", lambda served: _repeated(_COMPLETIONS, b'{"prompt":[', b"1", 5_000_000, b"]}")),
    Attack("completion of 499,000 ids", lambda served: _repeated(_COMPLETIONS, b'{"prompt":[', b"1", 499_000, b"]}")),
    Attack("completion of 2.9 M prompts", lambda served: _repeated(_COMPLETIONS, b'{"prompt":[', b'"["', 2_900_000, b"]}")),
    Attack("completion of 11 MB of quotation marks", lambda served: _text(_COMPLETIONS, "prompt", 11 * _MB // 2, '"')),
    Attack("completion of 1,024 prompts", lambda served: _completion(prompt=["hello"] * 1024)),
    Attack("completion of 128 prompts, n = 8", lambda served: _completion(prompt=["hello"] * 128, n=8)),
    Attack("completion of 128 prompts of 10 kB", lambda served: _completion(prompt=["hello " * 1700] * 128)),
    Attack("completion of 128 prompts of 48 kB", lambda served: _completion(prompt=["hello " * 8000] * 128)),
    Attack("completion of 8 prompts, n = 128", lambda served: _completion(prompt=["hello"] * 8, n=128)),
    Attack("completion of 50,000 lists", lambda served: _repeated(_COMPLETIONS, b'{"prompt":[', b"[]", 49_000, b"]}")),
    Attack(
        "49,000 keys that have no effect",
        lambda served: _completion(prompt="p", metadata={f"key number {number}": number for number in range(49_000)}),
    ),
    Attack(
        "the whole vocabulary as stop tokens, 20 prompts",
        lambda served: _completion(prompt=["p"] * 20, stop_token_ids=list(range(served.vocab_size))),
    ),
    Attack(
        "8,192 biases, 128 prompts",
        lambda served: _completion(prompt=["p"] * 128, logit_bias={str(number): 1 for number in range(8192)}),
    ),
    Attack("one header of 200 MB", lambda served: _endless_header()),
    Attack("one header of 200 MB, 6 times at once", lambda served: _endless_header(), num_connections=6),
    Attack("200 MB of headers", lambda served: _endless_headers()),
    Attack("20,000 requests sent ahead", lambda served: _sent_ahead()),
    Attack(f"{MANY_CONNECTIONS:,} idle connections", lambda served: iter(()), num_connections=MANY_CONNECTIONS, holds=True),
)


async def _attack_once(port: int, pieces: list[bytes]) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            line = await reader.readline()
        return line.split()[1].decode() if line else "closed"
    except TimeoutError:
        return "no answer"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()


def _hold(port: int, number: int) -> Counter[str]:
    """Open connections and look which of them are still open afterwards."""
    opened = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    opened[-1].settimeout(1.0)
    found: Counter[str] = Counter()
    for each in opened:
        each.settimeout(0.001)
        try:
            found["closed" if each.recv(1) == b"" else "answered"] += 1
        except TimeoutError:
            found["open"] += 1
        except ConnectionError:
            found["closed"] += 1
    for each in opened:
        each.close()
    return found


async def _send(attack: Attack, port: int, served: Served) -> Counter[str]:
    pieces = list(attack.pieces(served))
    return Counter(await asyncio.gather(*(_attack_once(port, pieces) for _ in range(attack.num_connections))))


def send() -> None:
    """Send the attack that the command line names, and print what came of it."""
    port, name, vocab_size, max_model_len = sys.argv[1:]
    (attack,) = [each for each in ATTACKS if each.name == name]
    if attack.holds:
        found = _hold(int(port), attack.num_connections)
    else:
        found = asyncio.run(_send(attack, int(port), Served(int(vocab_size), int(max_model_len))))
    print(json.dumps(found))
