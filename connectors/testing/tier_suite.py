"""What every connector that saves blocks to a tier, and loads them from there, must do: a test class to derive from.

    class TestMine(TierConformance):
        def make_connector(self, name):
            return my_connector(...)

Each test drives connectors through engines without a model (``connectors.testing.connector_engine``): ``saver`` computes
prompts, ``loader`` finds them in the tier. Where a tier is shared they are two workers; where it is a worker's own they are
one, whose pool forgets everything in between. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
import pytest_asyncio

from connectors.testing.connector_engine import ConnectorEngine
from connectors.testing.connector_pair import BLOCK_SIZE, FINGERPRINT, LAYOUT, NUM_BLOCKS, PROMPT, UNTOUCHED
from connectors.testing.scattered_blocks import scatter_blocks
from core.connector import Connector
from core.request import Request

FULL_BLOCKS = len(PROMPT) // BLOCK_SIZE
_GARBAGE = 0x5C


class TierWorker:
    """A connector and an engine without a model. It takes blocks in random order, its memory has a known content."""

    def __init__(self, name: str, connector: Connector) -> None:
        self.connector = connector
        self.engine = ConnectorEngine(connector.scheduler, connector.worker, FINGERPRINT, LAYOUT, NUM_BLOCKS, len(name))
        self.engine.checks_content = True
        self.engine.pool.rows[:] = UNTOUCHED
        scatter_blocks(self.engine.manager.block_pool, name)

    async def answer(self, request: Request) -> int:
        """Ask until the connector has an answer; return how many tokens it offers after the local hits."""
        _, num_hits = self.engine.manager.get_computed_blocks(request)
        scheduler, found = self.connector.scheduler, [0]

        def has_answered() -> bool:
            num_tokens, is_async = scheduler.get_num_new_matched_tokens(request, num_hits)
            assert num_tokens is None or is_async == (num_tokens > 0)
            found[0] = num_tokens or 0
            return num_tokens is not None

        await self.engine.until(has_answered)
        return found[0]

    async def start(self, request_id: str, prompt: list[int], cache_salt: str = "") -> Request:
        """Add and admit a request; if the tier has a hit, its load has begun."""
        request = self.engine.add(request_id, prompt, cache_salt=cache_salt)
        await self.answer(request)
        self.engine.admit(request)
        return request

    async def run(self, request_id: str, prompt: list[int], cache_salt: str = "") -> Request:
        """Load the tier's part of a prompt, and compute the rest."""
        request = await self.start(request_id, prompt, cache_salt)
        if request_id in self.engine.loads:
            await self.ended(request_id)
            assert self.engine.loads[request_id].error is None
        self.engine.compute_rest(request)
        assert self.engine.has_content(request)
        return request

    async def ended(self, *request_ids: str) -> None:
        """Wait for the ends of loads."""
        await self.engine.until(lambda: all(self.engine.loads[request_id].is_ended for request_id in request_ids))

    async def save(self, request_id: str, prompt: list[int], cache_salt: str = "") -> None:
        """Compute a prompt, end its request, and wait until the tier has it."""
        self.engine.finish(await self.run(request_id, prompt, cache_salt))
        await self.saved()

    async def saved(self) -> None:
        """Wait until no save is open."""
        scheduler = self.connector.scheduler
        await self.engine.until(lambda: not (scheduler.has_pending_push_work() or self.connector.num_saving_blocks()))

    def forget(self) -> None:
        """Forget all blocks of the pool."""
        assert self.engine.manager.reset_prefix_cache(), f"{self.engine.num_used_blocks} blocks are in use"
        self.engine.pool.rows[:] = UNTOUCHED

    def num_loaded(self, request_id: str) -> int:
        """Return how many blocks the request's load has filled."""
        outcome = self.engine.loads.get(request_id)
        return 0 if outcome is None else len(outcome.loaded) - len(outcome.bad)

    def assert_is_empty(self) -> None:
        """Check that no block is in use."""
        assert self.engine.num_used_blocks == 0
        assert not self.connector.scheduler.has_pending_push_work()
        assert not self.connector.scheduler.has_pending_block_frees()

    async def close(self) -> None:
        """Stop the connector, then close the memory."""
        await self.connector.stop()
        self.engine.close()


@pytest.mark.asyncio
class TierConformance:
    """The tests. ``is_shared`` is True where a second worker finds the first one's saves."""

    is_shared: ClassVar[bool] = False

    @abstractmethod
    def make_connector(self, name: str) -> Connector:
        """Return a new connector that is not started, for the worker ``name``; its arena holds at least 64 blocks."""

    def damage(self, connector: Connector, num_blocks: int) -> None:
        """Change a byte in each of the tier's first blocks, in the order in which they were stored."""
        pytest.skip("the tier's bytes cannot be reached")

    async def lose_store(self, connector: Connector) -> None:
        """Take the tier away from a connector that has started."""
        pytest.skip("the tier is a part of the worker")

    @pytest_asyncio.fixture
    async def saver(self) -> AsyncIterator[TierWorker]:
        """Return the worker that computes."""
        worker = TierWorker("saver", self.make_connector("saver"))
        try:
            await worker.connector.start()
            yield worker
        finally:
            await worker.close()

    @pytest_asyncio.fixture
    async def other(self, saver: TierWorker) -> AsyncIterator[TierWorker]:
        """Return the worker that loads: another one if the tier is shared."""
        if not self.is_shared:
            yield saver
            return
        worker = TierWorker("other", self.make_connector("other"))
        try:
            await worker.connector.start()
            yield worker
        finally:
            await worker.close()

    async def loader_after(self, saver: TierWorker, other: TierWorker, *prompts: list[int]) -> TierWorker:
        """Save prompts, and return the worker that has none of them in its pool."""
        for number, prompt in enumerate(prompts):
            await saver.save(f"saved-{number}", prompt)
        saver.forget()
        return other

    # ---- bytes -------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 700])
    async def test_full_blocks_come_back_exactly_and_no_other_is_touched(
        self, saver: TierWorker, other: TierWorker, num_tokens: int
    ) -> None:
        prompt = list(range(num_tokens))
        loader = await self.loader_after(saver, other, prompt)
        request = await loader.start("a", prompt)
        if num_tokens >= BLOCK_SIZE:
            await loader.ended("a")
        assert loader.num_loaded("a") == num_tokens // BLOCK_SIZE
        written = {row for row, content in enumerate(loader.engine.pool.rows) if (content != UNTOUCHED).any()}
        assert written == set(loader.engine.manager.get_block_ids("a")[0][: num_tokens // BLOCK_SIZE])
        loader.engine.compute_rest(request)
        assert loader.engine.has_content(request)
        loader.engine.finish(request)
        await loader.saved()
        loader.assert_is_empty()

    async def test_only_what_prompts_have_in_common_is_loaded(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        await loader.run("a", [*PROMPT[: 2 * BLOCK_SIZE], *range(900, 990)])
        assert loader.num_loaded("a") == 2

    async def test_only_the_suffix_after_a_local_hit_is_loaded(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, list(range(6 * BLOCK_SIZE)))
        loader.engine.finish(await loader.run("a", list(range(2 * BLOCK_SIZE))))
        await loader.run("b", list(range(6 * BLOCK_SIZE)))
        assert list(loader.engine.loads["b"].loaded) == [2, 3, 4, 5]

    async def test_a_prompt_that_grows_is_loaded_as_far_as_it_was_computed(self, saver: TierWorker, other: TierWorker) -> None:
        tokens = list(range(400))
        for turn in range(1, 5):
            worker = saver if turn % 2 else other
            request = await worker.run(f"turn-{turn}", tokens[: turn * 90])
            assert worker.num_loaded(f"turn-{turn}") == (turn - 1) * 90 // BLOCK_SIZE
            worker.engine.finish(request)
            await worker.saved()
            worker.forget()

    async def test_the_prefix_is_there_before_its_request_has_ended(self, saver: TierWorker, other: TierWorker) -> None:
        if not self.is_shared:
            pytest.skip("its own worker finds it in the pool")
        await saver.save("before", PROMPT[:BLOCK_SIZE])
        running = await saver.run("a", PROMPT)
        await saver.saved()
        await other.run("b", PROMPT)
        assert other.num_loaded("b") >= 1
        saver.engine.finish(running)

    # ---- which request gets which blocks -----------------------------------------------------------------------------

    async def test_another_salt_finds_nothing(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        request = await loader.run("b", PROMPT, "another tenant")
        assert loader.num_loaded("b") == 0
        loader.engine.finish(request)
        await loader.saved()
        loader.forget()
        await loader.run("c", PROMPT, "another tenant")
        assert loader.num_loaded("c") == FULL_BLOCKS

    async def test_asking_again_changes_nothing(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        request = loader.engine.add("a", PROMPT)
        for _ in range(3):
            assert await loader.answer(request) == FULL_BLOCKS * BLOCK_SIZE
        loader.engine.admit(request)
        await loader.ended("a")
        assert loader.num_loaded("a") == FULL_BLOCKS

    async def test_a_request_that_starts_to_run_or_resumes_loads_nothing_more(
        self, saver: TierWorker, other: TierWorker
    ) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        request = await loader.run("a", PROMPT)
        for _ in range(2):
            loader.connector.scheduler.update_state_after_alloc(request, loader.engine.manager.get_blocks("a"), 0)
            loader.engine.step()
        assert loader.num_loaded("a") == FULL_BLOCKS

    async def test_two_requests_with_one_prefix_load_it_once(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        first = await loader.start("a", PROMPT)
        second = await loader.run("b", PROMPT)
        assert loader.engine.loads["a"].is_ended
        assert "b" not in loader.engine.loads, "what another request brings is a local hit"
        loader.engine.compute_rest(first)
        for request in (first, second):
            loader.engine.finish(request)
        await loader.saved()
        loader.assert_is_empty()

    async def test_several_loads_at_once_keep_their_bytes_apart(self, saver: TierWorker, other: TierWorker) -> None:
        prompts = {name: [1000 * number + token for token in range(90)] for number, name in enumerate("abcdef")}
        loader = await self.loader_after(saver, other, *prompts.values())
        requests = [await loader.start(name, prompt) for name, prompt in reversed(prompts.items())]
        await loader.ended(*prompts)
        for request in requests:
            assert loader.num_loaded(request.request_id) == 2
            loader.engine.compute_rest(request)
            assert loader.engine.has_content(request)

    # ---- ends before their time --------------------------------------------------------------------------------------

    async def test_abort_before_admission_leaves_nothing(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        request = loader.engine.add("a", PROMPT)
        await loader.answer(request)
        loader.engine.abort(request)
        await loader.saved()
        loader.assert_is_empty()

    @pytest.mark.parametrize("turns", [None, 0, 1, 3, 10, 100])
    async def test_abort_while_loading_leaves_nothing(self, saver: TierWorker, other: TierWorker, turns: int | None) -> None:
        """``turns`` of the event loop pass between the step that starts the load and the abort; None: no step either."""
        loader = await self.loader_after(saver, other, PROMPT)
        request = await loader.start("a", PROMPT)
        if turns is not None:
            loader.engine.step()
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        loader.engine.abort(request)
        assert loader.engine.num_used_blocks >= FULL_BLOCKS, "blocks are free while bytes may still arrive"
        await loader.ended("a")
        assert loader.engine.loads["a"].error is None
        await loader.saved()
        loader.assert_is_empty()
        again = loader.engine.add("again", PROMPT)
        assert loader.engine.manager.get_computed_blocks(again)[1] == 0, "blocks of an aborted load are in the prefix cache"
        loader.engine.abort(again)

    async def test_blocks_are_kept_until_they_are_copied(self, saver: TierWorker, other: TierWorker) -> None:
        """Other requests take every block that is free after the request has ended, and write it at once."""
        request = await saver.run("a", PROMPT)
        saver.engine.finish(request)
        pool = saver.engine.manager.block_pool
        blocks = pool.get_new_blocks(pool.num_free_blocks)
        saver.engine.pool.rows[[block.block_id for block in blocks]] = _GARBAGE
        await saver.saved()
        pool.free_blocks(blocks)
        saver.forget()
        await other.run("b", PROMPT)
        assert other.num_loaded("b") == FULL_BLOCKS

    async def test_blocks_that_are_rewritten_before_their_turn_are_not_saved(
        self, saver: TierWorker, other: TierWorker
    ) -> None:
        request = await saver.run("a", PROMPT)
        saver.engine.manager.truncate(request, BLOCK_SIZE)  # all but the first block
        saver.engine.pool.rows[saver.engine.manager.get_block_ids("a")[0][1:]] = _GARBAGE
        saver.engine.finish(request)
        await saver.saved()
        saver.forget()
        await other.run("b", PROMPT)
        assert other.num_loaded("b") <= 1

    # ---- failures ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_damaged", [1, FULL_BLOCKS])
    async def test_bytes_that_have_changed_are_found_and_reported(
        self, saver: TierWorker, other: TierWorker, num_damaged: int
    ) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        self.damage(saver.connector, num_damaged)
        loader.engine.recomputes = True
        request = await loader.start("a", PROMPT)
        await loader.ended("a")
        outcome = loader.engine.loads["a"]
        assert outcome.error is not None
        assert outcome.error.code == "digest"
        assert outcome.usage is not None
        assert outcome.usage.verified_blocks == FULL_BLOCKS - num_damaged
        assert len(outcome.bad) == (num_damaged if num_damaged < FULL_BLOCKS else 0)
        assert loader.engine.admit(request) == 0, "what failed is not offered again"
        loader.engine.compute_rest(request)
        assert loader.engine.has_content(request)
        loader.engine.finish(request)
        await loader.saved()
        loader.forget()
        await loader.run("b", PROMPT)
        assert loader.num_loaded("b") == FULL_BLOCKS, "what was bad is stored again"

    async def test_a_tier_that_is_gone_has_nothing_and_takes_nothing(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        await self.lose_store(loader.connector)
        request = await loader.run("a", PROMPT)
        assert loader.num_loaded("a") == 0
        loader.engine.finish(request)
        await loader.saved()
        loader.assert_is_empty()

    async def test_a_load_ends_when_the_tier_is_lost(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, PROMPT)
        loader.engine.recomputes = True
        request = await loader.start("a", PROMPT)
        await self.lose_store(loader.connector)
        await loader.ended("a")
        if loader.engine.loads["a"].error is not None:
            assert loader.engine.admit(request) == 0
        loader.engine.compute_rest(request)
        assert loader.engine.has_content(request)

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def test_empty_steps_say_nothing(self, saver: TierWorker) -> None:
        for _ in range(10):
            assert saver.engine.step().is_empty()
        saver.assert_is_empty()

    async def test_ending_twice_does_no_harm(self, saver: TierWorker) -> None:
        await saver.save("a", PROMPT)
        for _ in range(2):
            saver.connector.scheduler.shutdown()
            saver.connector.worker.shutdown()
            await saver.connector.stop()

    async def test_ends_in_the_middle_of_copies(self, saver: TierWorker, other: TierWorker) -> None:
        loader = await self.loader_after(saver, other, list(range(700)))
        await loader.start("a", list(range(700)))
        loader.engine.finish(await loader.run("b", list(range(5000, 5700))))
        loader.engine.step()
        await loader.connector.stop()

    async def test_a_connector_that_never_started_can_be_stopped(self) -> None:
        worker = TierWorker("unborn", self.make_connector("unborn"))
        await worker.close()
