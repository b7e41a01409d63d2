"""What a KV connector must do that loads beginnings of prompts from other workers, and serves them: a class to derive from.

    class TestMine(PrefixConformance):
        def make_connector(self, engine_id):
            return my_connector(...)

Such a connector has a ``prefix_address``. Its scheduler side answers "ask again" for a request with a ``kv_source`` until the
source has answered, then offers what it holds; if nothing comes in time, the request computes its prompt. Nothing may go wrong
because of it: it only saves time. Each test drives two connectors of one process through engines without a model
(``connector_engine``), which check every block. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import pytest
import pytest_asyncio

from connectors.testing.connector_pair import BLOCK_SIZE, INCARNATIONS, PROMPT, Side
from core.connector import Connector
from core.request import Request
from core.wire.kv import KVSource
from core.wire.messages import Role

SOURCE, READER = "decode-0", "prefill-0"  # the engine ids
ROLES: dict[str, Role] = {SOURCE: "decode", READER: "prefill"}
PATIENCE_MS = 20_000  # of readers whose source should answer
IMPATIENCE_MS = 300
HELD_TOKENS = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
NOWHERE = "tcp://127.0.0.1:9"  # the port "discard", where nothing listens


@dataclass(frozen=True, slots=True)
class PrefixPair:
    """A worker that holds beginnings of prompts, and one that reads them."""

    source: Side
    reader: Side

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Let both workers run until the condition holds. Raises: TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.source.engine.step()
                self.reader.engine.step()
                await asyncio.sleep(0.001)

    def hold(self, prompt: list[int], side: Side | None = None, cache_salt: str = "") -> None:
        """Let the source, or another side, have computed a prompt and finished with it."""
        side = side or self.source
        name = f"before {len(prompt)} {prompt[-1]} {cache_salt}"
        request = side.engine.add(name, prompt, cache_salt=cache_salt)
        assert side.engine.admit(request) == 0
        side.engine.compute_rest(request)
        side.engine.finish(request)

    def named(self, **changes: object) -> KVSource:
        """Return the source as a router names it."""
        source = KVSource(
            engine_id=SOURCE,
            incarnation=INCARNATIONS[ROLES[SOURCE]],
            control_address=self.source.connector.prefix_address,
            num_tokens=HELD_TOKENS,
            patience_ms=PATIENCE_MS,
        )
        return msgspec.structs.replace(source, **changes)

    def begin(self, prompt: list[int], source: KVSource | None = None, cache_salt: str = "", name: str = "r") -> Request:
        """Give the reader a request with a source, and let it ask."""
        request = self.reader.engine.add(name, prompt, cache_salt=cache_salt, kv_source=source or self.named())
        self.reader.engine.offered_tokens(request)
        return request

    async def admitted(self, request: Request) -> int:
        """Wait for the answer and admit the request; return how many tokens are loaded."""
        engine = self.reader.engine
        await self.until(lambda: engine.offered_tokens(request) is not None)
        return engine.admit(request)

    async def ended(self, *names: str) -> None:
        """Wait for the ends of loads."""
        loads = self.reader.engine.loads
        await self.until(lambda: all(loads[name].is_ended for name in names))

    async def load(self, prompt: list[int], **changes: object) -> tuple[Request, int]:
        """Ask, load and compute the rest; return the request, which runs, and how many tokens were loaded."""
        request = self.begin(prompt, **changes)  # type: ignore[arg-type]
        num_loaded = await self.admitted(request)
        if num_loaded:
            await self.ended(request.request_id)
            assert self.reader.engine.loads[request.request_id].error is None
        self.reader.engine.compute_rest(request)
        assert self.reader.engine.has_content(request)
        return request, num_loaded

    async def drained(self, sides: Iterable[Side] = ()) -> None:
        """Wait until neither worker holds a block for anyone."""
        sides = list(sides) or [self.source, self.reader]
        await self.until(lambda: not any(side.engine.num_used_blocks or side.connector.num_leased_blocks() for side in sides))


@pytest.mark.asyncio
class PrefixConformance:
    """The tests. A source must leave ``free_share`` of its pool free beside what it keeps for readers."""

    free_share: ClassVar[float] = 0.1

    @abstractmethod
    def make_connector(self, engine_id: str) -> Connector:
        """Return a new connector that is not started, of the worker with this name: ``SOURCE`` or ``READER``."""

    @pytest_asyncio.fixture
    async def peers(self) -> AsyncIterator[PrefixPair]:
        """Start both workers; stop them in the end, in any state."""
        sides = [Side(ROLES[name], self.make_connector(name)) for name in (SOURCE, READER)]
        try:
            for side in sides:
                await side.connector.start()
                side.engine.recomputes = True
            assert all(side.connector.prefix_address for side in sides)
            yield PrefixPair(*sides)
        finally:
            for side in reversed(sides):
                await side.close()

    # ---- bytes -----------------------------------------------------------------------------------------------------------

    async def test_what_a_source_holds_arrives_exactly_and_the_rest_is_computed(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        before = peers.reader.untouched_rows()
        request = peers.begin(PROMPT)
        assert await peers.admitted(request) == HELD_TOKENS
        await peers.ended("r")
        written = set(peers.reader.block_ids(request)[: HELD_TOKENS // BLOCK_SIZE])
        assert before - peers.reader.untouched_rows() == written
        peers.reader.engine.compute_rest(request)
        assert peers.reader.engine.has_content(request)
        peers.reader.engine.finish(request)
        await peers.drained()

    async def test_only_what_the_reader_lacks_is_loaded(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        peers.hold(PROMPT[:BLOCK_SIZE], peers.reader)
        request, num_loaded = await peers.load(PROMPT)
        assert num_loaded == HELD_TOKENS - BLOCK_SIZE
        peers.reader.engine.finish(request)
        await peers.drained()

    async def test_a_prompt_that_differs_later_gets_the_common_blocks(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        request, num_loaded = await peers.load([*PROMPT[: 2 * BLOCK_SIZE + 5], *range(7000, 7060)])
        assert num_loaded == 2 * BLOCK_SIZE
        peers.reader.engine.finish(request)
        await peers.drained()

    async def test_several_readers_load_the_same_blocks_at_once(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        requests = [peers.begin([*PROMPT[:HELD_TOKENS], 9000 + number], name=f"{number}") for number in range(2)]
        for request in requests:
            await peers.admitted(request)
        await peers.ended(*(name for name in peers.reader.engine.loads))
        for request in requests:
            peers.reader.engine.compute_rest(request)
            assert peers.reader.engine.has_content(request)
            peers.reader.engine.finish(request)
        await peers.drained()

    async def test_what_was_loaded_is_a_source_for_others(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        request, _ = await peers.load(PROMPT)
        peers.reader.engine.finish(request)
        found = peers.reader.engine.add("next", [*PROMPT[:HELD_TOKENS], 5])
        assert peers.reader.engine.admit(found) == 0
        assert found.num_computed_tokens == HELD_TOKENS

    # ---- nothing to load -------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("why", ["another prompt", "another salt", "restarted", "nobody there", "evicted"])
    async def test_what_cannot_be_loaded_is_computed(self, peers: PrefixPair, why: str) -> None:
        peers.hold(PROMPT, cache_salt="theirs" if why == "another salt" else "")
        source, prompt = peers.named(), PROMPT
        match why:
            case "another prompt":
                prompt = [1, *PROMPT[1:]]
            case "restarted":
                source = peers.named(incarnation=99)
            case "nobody there":
                source = peers.named(control_address=NOWHERE, patience_ms=IMPATIENCE_MS)
            case "evicted":
                peers.source.engine.manager.reset_prefix_cache()
        request, num_loaded = await peers.load(prompt, source=source, cache_salt="ours" if why == "another salt" else "")
        assert num_loaded == 0
        peers.reader.engine.finish(request)
        await peers.drained()

    async def test_a_source_that_does_not_answer_is_given_up(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        request = peers.begin(PROMPT, source=peers.named(patience_ms=IMPATIENCE_MS))
        engine = peers.reader.engine
        await engine.until(lambda: engine.offered_tokens(request) is not None)  # the source's engine makes no step
        assert engine.admit(request) == 0
        engine.compute_rest(request)
        engine.finish(request)
        await peers.drained()

    async def test_a_request_without_a_source_waits_for_nobody(self, peers: PrefixPair) -> None:
        request = peers.reader.engine.add("r", PROMPT)
        assert peers.reader.engine.offered_tokens(request) == 0

    async def test_a_preempted_request_loads_its_prompt_again(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        request, _ = await peers.load(PROMPT)
        engine = peers.reader.engine
        engine.manager.free(request)
        engine.manager.reset_prefix_cache()  # others have taken its blocks
        request.num_computed_tokens, request.num_preemptions = 0, 1
        assert await peers.admitted(request) == HELD_TOKENS
        await peers.ended("r")
        engine.compute_rest(request)
        assert engine.has_content(request)
        engine.finish(request)
        await peers.drained()

    # ---- ends in the middle ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_steps", [0, 1, 3, 10])
    async def test_a_request_that_ends_meanwhile_leaves_nothing(self, peers: PrefixPair, num_steps: int) -> None:
        peers.hold(PROMPT)
        request = peers.begin(PROMPT)
        for _ in range(num_steps):
            peers.source.engine.step()
            peers.reader.engine.step()
            await asyncio.sleep(0.001)
        peers.reader.engine.abort(request)
        await peers.drained()

    async def test_a_load_that_is_aborted_leaves_nothing(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        request = peers.begin(PROMPT)
        await peers.admitted(request)
        peers.reader.engine.abort(request)
        await peers.drained()
        await peers.until(lambda: not peers.reader.engine.quarantined)

    # ---- a favour --------------------------------------------------------------------------------------------------------

    async def test_a_source_under_pressure_gets_its_blocks_back_at_once(self, peers: PrefixPair) -> None:
        peers.hold(PROMPT)
        request = peers.begin(PROMPT)
        await peers.until(lambda: peers.reader.engine.offered_tokens(request) is not None)
        peers.source.connector.scheduler.free_spare_blocks()
        assert peers.source.engine.num_used_blocks == 0

    async def test_blocks_that_are_overwritten_under_a_reader_are_never_used(self, peers: PrefixPair) -> None:
        """The engine checks the content of every block that is not reported as bad."""
        peers.hold(PROMPT)
        request = peers.begin(PROMPT)
        await peers.until(lambda: peers.reader.engine.offered_tokens(request) is not None)
        peers.source.connector.scheduler.free_spare_blocks()
        for number in range(12):  # more than the pool has
            peers.hold([number, *range(20_000, 20_000 + 8 * BLOCK_SIZE)])
        await peers.admitted(request)
        await peers.ended("r")
        assert peers.reader.engine.loads["r"].error is not None
        peers.reader.engine.abort(request)
        await peers.drained()

    async def test_what_is_kept_for_readers_is_bounded(self, peers: PrefixPair) -> None:
        """Readers that never read: the source leaves blocks free, and its own requests get all of them."""
        pool = peers.source.engine.manager.block_pool
        prompts = [[number, *range(3 * BLOCK_SIZE)] for number in range(pool.num_usable_blocks // 3)]
        for prompt in prompts:
            peers.hold(prompt)
        for number, prompt in enumerate(prompts):
            request = peers.begin(prompt, source=peers.named(num_tokens=3 * BLOCK_SIZE), name=f"{number}")
            await peers.until(lambda request=request: peers.reader.engine.offered_tokens(request) is not None)  # type: ignore[misc]
        assert peers.source.engine.num_used_blocks > 0
        assert pool.num_free_blocks >= self.free_share * pool.num_usable_blocks
        assert peers.source.connector.num_leased_blocks() >= peers.source.engine.num_used_blocks
        peers.source.connector.scheduler.free_spare_blocks()
        assert peers.source.engine.num_used_blocks == 0

    async def test_a_source_is_asked_once_unless_the_request_is_preempted(self, peers: PrefixPair) -> None:
        request = peers.begin(PROMPT)
        await peers.until(lambda: peers.reader.engine.offered_tokens(request) is not None)
        assert [peers.reader.engine.offered_tokens(request) for _ in range(3)] == [0, 0, 0]
        peers.hold(PROMPT)
        request.num_preemptions += 1
        assert await peers.admitted(request) == HELD_TOKENS
        await peers.ended("r")
        assert peers.reader.engine.loads["r"].error is None
