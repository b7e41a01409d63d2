"""What a connector must do that loads the computed part of a prompt while the rest is computed: a test class to derive from.

    class TestMineEarly(EarlyPullConformance):
        def make_connector(self, role, patience_s):
            return my_connector(...)

For connectors whose scheduler side has ``reads_early`` and describes prefixes (``describe_prefix``), besides
``ConnectorConformance``. Nothing keeps the producer's blocks: it may use them again at any time, and the reader must find out.
Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from connectors.testing.connector_pair import BLOCK_SIZE, LAYOUT, NUM_BLOCKS, Pair
from connectors.testing.connector_pairs import PATIENCE_S, ConnectorPairs
from core.request import Request
from core.wire.kv import KVHandoff

PROMPT = list(range(300, 300 + 5 * BLOCK_SIZE + 9))
NUM_FIRST, NUM_SECOND = 2 * BLOCK_SIZE, 5 * BLOCK_SIZE  # tokens that are computed after one and after two chunks


@pytest.mark.asyncio
class EarlyPullConformance(ConnectorPairs):
    """The tests."""

    async def test_the_connector_says_that_it_reads_early(self, pair: Pair) -> None:
        assert pair.consumer.connector.scheduler.reads_early

    # ---- rounds ----------------------------------------------------------------------------------------------------

    async def test_rounds_and_the_handoff_load_each_block_once_and_exactly(self, pair: Pair) -> None:
        engine = pair.consumer.engine
        prompt, handoff = self.begin(pair)
        first = self.load_early(pair, "a/early/0", handoff)
        await pair.ended("a/early/0")
        self.assert_loaded(pair, first, 2)
        pair.producer.engine.continue_prefill(prompt, NUM_SECOND)
        second = self.load_early(pair, "a/early/1", self.describe(pair, prompt, NUM_SECOND))
        await pair.ended("a/early/1")
        self.assert_loaded(pair, second, 3)
        pair.producer.engine.continue_prefill(prompt, len(PROMPT))
        request = pair.load("a", PROMPT, pair.producer.engine.end_prefill(prompt))
        await pair.ended("a")
        self.assert_loaded(pair, request, 1)
        await pair.drained()
        for each in (first, second):
            engine.abort(each)
        engine.finish(request)
        await self.assert_consumer_is_empty(pair)

    async def test_what_was_read_early_is_a_hit_without_its_round(self, pair: Pair) -> None:
        prompt, handoff = self.begin(pair)
        early = self.load_early(pair, "a/early/0", handoff)
        await pair.ended("a/early/0")
        pair.consumer.engine.abort(early)
        pair.producer.engine.continue_prefill(prompt, len(PROMPT))
        request = pair.load("a", PROMPT, pair.producer.engine.end_prefill(prompt))
        await pair.ended("a")
        self.assert_loaded(pair, request, 4)
        await pair.drained()

    async def test_nothing_is_kept_at_the_producer_for_a_round(self, pair: Pair) -> None:
        prompt, handoff = self.begin(pair)
        self.load_early(pair, "a/early/0", handoff)
        assert pair.producer.connector.num_leased_blocks() == 0
        await pair.ended("a/early/0")
        assert pair.producer.connector.num_leased_blocks() == 0
        pair.producer.engine.abort(prompt)
        await pair.drained()

    async def test_a_prefix_is_described_without_a_lease_and_only_from_its_first_token(self, pair: Pair) -> None:
        prompt, _ = self.begin(pair)
        pair.producer.engine.continue_prefill(prompt, NUM_SECOND)
        part = pair.producer.connector.scheduler.describe_prefix(prompt, NUM_FIRST, NUM_SECOND)
        assert part is not None
        (group,) = part.groups
        assert (part.lease_ms, part.num_tokens, group.first_block, len(group.block_ids)) == (0, NUM_SECOND, 2, 3)

    # ---- the producer gives up -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("turns", [None, 0, 1, 3, 10, 100])
    async def test_blocks_that_the_producer_uses_again_are_never_taken_for_the_prompt(
        self, pair: Pair, turns: int | None
    ) -> None:
        """``turns`` of the event loop pass between the step that starts the round and the reuse; None: it comes before."""
        prompt, handoff = self.begin(pair)
        if turns is None:
            await self.reuse_blocks(pair, prompt)
        early = self.load_early(pair, "a/early/0", handoff)
        pair.consumer.engine.step()
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        if turns is not None:
            await self.reuse_blocks(pair, prompt)
        await pair.ended("a/early/0")  # the engine compares every block that was not reported bad
        outcome = pair.consumer.engine.loads["a/early/0"]
        if turns is None:
            assert outcome.error is not None
            await self.assert_failed(pair, "a/early/0", PROMPT)
        elif outcome.error is None:
            pair.consumer.engine.abort(early)
        await self.assert_consumer_is_empty(pair)

    async def test_an_aborted_prompt_leaves_a_round_that_is_right_or_fails(self, pair: Pair) -> None:
        prompt, handoff = self.begin(pair)
        early = self.load_early(pair, "a/early/0", handoff)
        pair.producer.engine.abort(prompt)
        await pair.ended("a/early/0")
        if pair.consumer.engine.loads["a/early/0"].error is None:
            self.assert_loaded(pair, early, 2)
            pair.consumer.engine.abort(early)
        await self.assert_consumer_is_empty(pair)
        await pair.drained()

    async def test_a_round_from_another_start_of_the_producer_fails(self, pair: Pair) -> None:
        _, handoff = self.begin(pair)
        self.load_early(pair, "a/early/0", msgspec.structs.replace(handoff, incarnation=handoff.incarnation + 1))
        await pair.ended("a/early/0")
        await self.assert_failed(pair, "a/early/0", PROMPT)

    async def test_a_round_of_another_generation_of_the_blocks_fails(self, pair: Pair) -> None:
        _, handoff = self.begin(pair)
        (group,) = handoff.groups
        later = msgspec.structs.replace(group, generations=tuple(number + 1 for number in group.generations))
        self.load_early(pair, "a/early/0", msgspec.structs.replace(handoff, groups=(later,)))
        await pair.ended("a/early/0")
        await self.assert_failed(pair, "a/early/0", PROMPT)

    async def test_a_round_of_another_prompt_reads_nothing(self, pair: Pair) -> None:
        _, handoff = self.begin(pair)
        early = pair.consumer.engine.add_early("a/early/0", [*PROMPT[:-20], 1, *PROMPT[-19:]][::-1], handoff)
        pair.consumer.engine.admit(early)
        await pair.ended("a/early/0")
        await self.assert_failed(pair, "a/early/0", PROMPT)
        assert pair.consumer.untouched_rows() == set(range(NUM_BLOCKS))

    async def test_a_round_from_a_producer_that_is_gone_fails_once_and_leaves_nothing(self, impatient: Pair) -> None:
        _, handoff = self.begin(impatient)
        await impatient.producer.connector.stop()
        self.load_early(impatient, "a/early/0", handoff)
        engine = impatient.consumer.engine
        await engine.until(lambda: engine.loads["a/early/0"].is_ended)
        await self.assert_failed(impatient, "a/early/0", PROMPT)

    # ---- the reader gives up -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("turns", [None, 0, 1, 3, 10, 100])
    async def test_abort_of_a_round_leaves_nothing(self, pair: Pair, turns: int | None) -> None:
        """``turns`` of the event loop pass between the step that starts the round and the abort; None: no step either."""
        _, handoff = self.begin(pair)
        early = self.load_early(pair, "a/early/0", handoff)
        if turns is not None:
            pair.consumer.engine.step()
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        pair.consumer.engine.abort(early)
        await pair.ended("a/early/0")
        assert pair.consumer.engine.loads["a/early/0"].error is None
        await self.assert_ended_once(pair, "a/early/0")
        await self.assert_consumer_is_empty(pair)

    async def test_abort_of_a_round_without_progress_ends_it(self, pair: Pair) -> None:
        _, handoff = self.begin(pair)
        await pair.producer.connector.stop()
        early = self.load_early(pair, "a/early/0", handoff)
        engine = pair.consumer.engine
        engine.step()
        engine.abort(early)
        await engine.until(lambda: engine.loads["a/early/0"].is_ended, PATIENCE_S / 2)
        await self.assert_consumer_is_empty(pair)

    async def test_a_handoff_is_loaded_whole_after_a_failed_round(self, pair: Pair) -> None:
        prompt, handoff = self.begin(pair)
        self.load_early(pair, "a/early/0", msgspec.structs.replace(handoff, incarnation=handoff.incarnation + 1))
        await pair.ended("a/early/0")
        pair.producer.engine.continue_prefill(prompt, len(PROMPT))
        request = pair.load("a", PROMPT, pair.producer.engine.end_prefill(prompt))
        await pair.ended("a")
        self.assert_loaded(pair, request, 6)
        await pair.drained()

    # ---- details -------------------------------------------------------------------------------------------------------

    def begin(self, pair: Pair) -> tuple[Request, KVHandoff]:
        """Compute the first chunk of a prompt, and describe it."""
        prompt = pair.producer.engine.begin_prefill("p", PROMPT, NUM_FIRST)
        return prompt, self.describe(pair, prompt, NUM_FIRST)

    def describe(self, pair: Pair, prompt: Request, num_tokens: int) -> KVHandoff:
        """Describe all blocks of a prompt that are computed."""
        handoff = pair.producer.connector.scheduler.describe_prefix(prompt, 0, num_tokens)
        assert handoff is not None
        return handoff

    def load_early(self, pair: Pair, request_id: str, handoff: KVHandoff) -> Request:
        """Begin a round."""
        early = pair.consumer.engine.add_early(request_id, PROMPT, handoff)
        assert pair.consumer.engine.admit(early) > 0
        return early

    async def reuse_blocks(self, pair: Pair, prompt: Request) -> None:
        """End the prompt, and give all blocks of the producer other content, as soon as they are free."""
        engine, connector = pair.producer.engine, pair.producer.connector
        engine.abort(prompt)
        await engine.until(lambda: not (connector.num_saving_blocks() or engine.num_used_blocks))
        pool = engine.manager.block_pool
        blocks = pool.get_new_blocks(pool.num_free_blocks)
        engine.pool.rows[[block.block_id for block in blocks]] = 7
        pool.free_blocks(blocks)

    def assert_loaded(self, pair: Pair, request: Request, num_blocks: int) -> None:
        """Check that a load has read so many blocks, and that all blocks of the request are right."""
        engine = pair.consumer.engine
        outcome = engine.loads[request.request_id]
        assert outcome.error is None
        assert outcome.usage is not None
        assert outcome.usage.transferred_bytes == num_blocks * LAYOUT.block_bytes
        block_ids = pair.consumer.block_ids(request)
        num_full = min(request.num_computed_tokens // BLOCK_SIZE, len(block_ids))
        for position in range(num_full):
            assert (engine.pool.rows[block_ids[position]] == engine.content(request, position)).all()
