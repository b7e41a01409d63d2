"""Engines of vLLM for the tests of the plug-in, shared as far as their settings are equal."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.support.vllm_engine import REMOTE_DECODE, EngineFailed, VllmEngine, vllm_python

LEASE_S, DEADLINE_S = 2.0, 3.0
WAIT_S = 30.0
OURS = "KvferryConnector"


@pytest.fixture(scope="session", autouse=True)
def _vllm_is_installed() -> None:
    if not vllm_python().is_file():
        pytest.skip(f"no {vllm_python()}: run `make install-vllm`")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Return the folder of a tiny model."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


def settings(transport: str = "tcp", **changes: Any) -> dict[str, Any]:
    """Return ``kv_connector_extra_config`` with short times."""
    values = {
        "transports": [transport],
        "lease_s": LEASE_S,
        "lease_renew_interval_s": 0.5,
        "transfer_deadline_s": DEADLINE_S,
    } | changes
    return {f"kvferry.{name}": value for name, value in values.items()}


@dataclass
class Pair:
    """An engine that computes prompts, and one that loads them. Every prompt is new."""

    p: VllmEngine
    d: VllmEngine
    connector: str = OURS
    seed: int = 3  # of its prompts

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._num_names = 0

    def name(self) -> str:
        """Return a name for a request."""
        self._num_names += 1
        return f"r{self._num_names}"

    def prompt(self, num_tokens: int = 300) -> list[int]:
        """Return random tokens."""
        return [self._random.randrange(5, VOCAB_SIZE) for _ in range(num_tokens)]

    def hand_off(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        """Let P compute a prompt; return the ``kv_transfer_params`` of its answer."""
        answer = self.p.generate(self.name(), prompt, 1, params=REMOTE_DECODE, **options)
        if not answer.get("params"):
            raise EngineFailed(f"P has published nothing: {answer}")
        found: dict[str, Any] = answer["params"]
        return found

    def answer(self, prompt: list[int], params: dict[str, Any] | None, **options: Any) -> list[int]:
        """Return D's tokens."""
        result = self.d.generate(self.name(), prompt, params=params, **options)
        if result.get("finish_reason") != "length":
            raise EngineFailed(f"D has not answered: {result}")
        tokens: list[int] = result["tokens"]
        return tokens

    def reference(self, prompt: list[int], **options: Any) -> list[int]:
        """Return the right tokens: D's own, which a salt keeps from its prefix cache."""
        return self.answer(prompt, None, **({"cache_salt": self.name()} | options))

    def reuse_blocks(self) -> None:
        """Let P write other prompts into all of its free blocks."""
        for _ in range(6):
            self.p.generate(self.name(), self.prompt(), 2)

    def num_computed(self, prompt: list[int], params: dict[str, Any] | None) -> int:
        """Have D answer, check its tokens, and return how many of the prompt's it has computed itself."""
        before = self.d.ask("usage")["scheduled_tokens"]
        tokens = self.answer(prompt, params)
        computed = self.d.ask("usage")["scheduled_tokens"] - before
        assert tokens == self.reference(prompt)
        return int(computed) - len(tokens) + 1  # each but the last was input of a step of its own

    def counts(self) -> dict[str, Any]:
        """Return what D's loads have brought since the pair was made."""
        found: dict[str, Any] = self.d.ask("counts")
        return found

    def assert_nothing_is_held(self) -> None:
        """Wait for a lease's time until both engines hold nothing."""
        end = time.monotonic() + LEASE_S + 10
        while True:
            usages = [engine.ask("usage") for engine in (self.p, self.d)]
            if all(_holds_nothing(usage) for usage in usages):
                return
            assert time.monotonic() < end, usages
            time.sleep(0.05)


def _holds_nothing(usage: dict[str, Any]) -> bool:
    assert usage["violations"] == []
    held = ("used_blocks", "requests", "published", "sealed", "held_by_ranks", "loading", "quarantined")
    return all(not usage.get(name) for name in held)


def wait_until(condition: Callable[[], object]) -> None:
    """Ask again and again until a condition holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


NewPair = Callable[..., Pair]


@contextlib.contextmanager
def pair_maker(make_folder: Callable[[str], Path], model: Path) -> Iterator[NewPair]:
    """Yield a function that starts a pair; all of its pairs end with the context.

    ``environments`` are variables of P and of D; other keyword arguments are those of ``VllmEngine``.
    """
    started: list[VllmEngine] = []

    def new(connector: str = OURS, environments: Sequence[dict[str, str]] = ({}, {}), **arguments: Any) -> Pair:
        folder = make_folder("pair")
        made = [
            VllmEngine(
                folder / f"{name}.log",
                **{"model": model, "connector": connector, "num_blocks": num_blocks, "environment": variables} | arguments,
            )
            for name, num_blocks, variables in zip("pd", (40, 64), environments, strict=True)
        ]
        started.extend(made)
        for engine in made:
            engine.start()
        return Pair(*(engine.wait() for engine in made), connector)

    try:
        yield new
    finally:
        for engine in started:
            engine.kill()


@pytest.fixture(scope="session")
def new_lasting_pair(tmp_path_factory, tiny_llama) -> Iterator[NewPair]:
    """Return a function that starts a pair for several files of tests; it ends with the session."""
    with pair_maker(tmp_path_factory.mktemp, tiny_llama) as new:
        yield new


@pytest.fixture(scope="module")
def new_pair(tmp_path_factory, tiny_llama) -> Iterator[NewPair]:
    """Return a function that starts a pair; it ends with the file of tests: an engine takes half a gigabyte."""
    with pair_maker(tmp_path_factory.mktemp, tiny_llama) as new:
        yield new


@pytest.fixture(scope="session")
def tcp_pair(new_lasting_pair) -> Pair:
    """Return a pair of engines over tcp; no test may end or change them."""
    return new_lasting_pair(extra=settings("tcp"))


@pytest.fixture(scope="session")
def nixl_pair(new_lasting_pair) -> Pair:
    """Return a pair of engines over NIXL; no test may end or change them."""
    return new_lasting_pair(extra=settings("nixl"))


@pytest.fixture(params=["tcp", "nixl"])
def pair(request) -> Iterator[Pair]:
    """Return a pair over each transport; afterwards it holds nothing."""
    found = request.getfixturevalue(f"{request.param}_pair")
    yield found
    found.assert_nothing_is_held()
