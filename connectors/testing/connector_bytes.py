"""Bytes of other requests: blocks that are used again, bytes that change on the way, and copies that come late.

A part of ``connector_suite``. What goes wrong here is a wrong token of a request that ends well, so nothing else tells of it.
Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from connectors.testing.connector_pair import OVERWRITTEN, PROMPT, Moment, Pair
from connectors.testing.connector_pairs import PROMPT_BLOCKS, ConnectorPairs
from core.wire.kv import KVHandoff

NUM_PROMPTS = 24  # more than fit into a pool at once
_DIGESTS_S = 0.05  # for digests of blocks that a producer has heard of: no report says that they are made


class ByteConformance(ConnectorPairs):
    """The tests. ``holds_until_read`` is False for a connector whose producer frees the blocks before they are read.

    ``can_be_damaged`` is False for one that finds no changed byte, because it trusts what carries the bytes.
    """

    holds_until_read: ClassVar[bool] = True
    can_be_damaged: ClassVar[bool] = True

    def damage(self, pair: Pair, handoff: KVHandoff, position: int) -> None:
        """Change a byte of a block of a handoff, by its position in the prompt, where a reader will read it.

        Here that is the producer's pool. Override it if the blocks lie elsewhere until they are read.
        """
        if not self.holds_until_read:
            raise NotImplementedError("override damage, or set can_be_damaged = False if no changed byte is found")
        pair.producer.engine.pool.rows[handoff.groups[0].block_ids[position], 5] ^= 1

    async def make_readable(self, pair: Pair, request_id: str, prompt: list[int]) -> KVHandoff:
        """Compute a prompt, and let the producer's connector hear of it.

        If the producer's blocks will be free before they are read, wait until they are. Override it if a producer that holds
        them takes long to make digests of them.
        """
        handoff = pair.producer.engine.prefill(request_id, prompt)
        assert handoff is not None
        await pair.producer.settle()
        if not self.holds_until_read:
            await pair.producer.engine.until(lambda: request_id not in pair.producer.engine.parked)
        return handoff

    async def test_blocks_are_kept_until_they_are_read(self, either_pair: Pair) -> None:
        """Another request takes the producer's blocks, and writes them, in the very step in which they are free."""
        pair = either_pair
        pair.producer.overwrites_freed_blocks = True
        handoff = await self.make_readable(pair, "a", PROMPT)
        early = pair.load("a", PROMPT, handoff)
        other = [*PROMPT[:-1], 7]
        late = pair.load("b", other, pair.producer.engine.prefill("b", other))
        await pair.ended("a", "b")
        assert pair.consumer.engine.loads["a"].error is None
        assert pair.consumer.engine.loads["b"].error is None
        assert pair.consumer.engine.has_content(early)
        assert pair.consumer.engine.has_content(late)
        await pair.drained()

    async def test_blocks_are_used_again_for_other_prompts(self, either_pair: Pair) -> None:
        """Bytes that a connector keeps by block are soon those of another prompt."""
        pair, used, num_blocks = either_pair, set[int](), 0
        for number in range(NUM_PROMPTS):
            prompt = [1000 * number + token for token in range(len(PROMPT))]
            request = await pair.make_handoff(f"a{number}", prompt)
            assert pair.consumer.engine.has_content(request)
            used.update(pair.consumer.block_ids(request)[:PROMPT_BLOCKS])
            num_blocks += PROMPT_BLOCKS
            await pair.drained()
            pair.consumer.engine.finish(request)
        assert len(used) < num_blocks, "the test is too short"
        await self.assert_consumer_is_empty(pair)

    @pytest.mark.parametrize("position", [0, PROMPT_BLOCKS - 1])
    async def test_a_byte_that_has_changed_is_never_used(self, pair: Pair, position: int) -> None:
        """Disks, networks and servers change bytes: the load fails, in whole or for the blocks concerned."""
        if not self.can_be_damaged:
            pytest.skip("the connector finds no changed byte")
        handoff = await self.make_readable(pair, "a", PROMPT)
        if self.holds_until_read:
            await asyncio.sleep(_DIGESTS_S)
        self.damage(pair, handoff, position)
        pair.load("a", PROMPT, handoff)
        try:
            await pair.ended("a")
        except AssertionError as used:
            raise AssertionError(
                f"the load used a byte that damage has changed in block {position}: {used}; if the connector makes its digests"
                " later than that, override make_readable to wait for them, or damage to change what has been copied"
            ) from used
        outcome = pair.consumer.engine.loads["a"]
        assert outcome.error is not None, "the load has not failed: does damage change what the reader reads?"
        assert not outcome.bad or position in outcome.bad
        await self.assert_ended_once(pair, "a")
        await pair.drained()
        await self.assert_consumer_is_empty(pair)

    async def test_nothing_writes_the_blocks_of_a_load_after_the_end_of_its_abort(self, pair: Pair) -> None:
        """What is free is another request's: here nobody's, while further loads go through and until both sides have ended."""
        consumer, pool = pair.consumer.engine, pair.consumer.engine.manager.block_pool
        watched: set[int] = set()
        moments: tuple[Moment, ...] = ("no bytes", "no bytes", 0, 3, 30, "first bytes", "first bytes")
        for number, moment in enumerate(moments):
            request = await pair.load_until(moment, f"a{number}", [number, *PROMPT[1:]])
            block_ids = set(pair.consumer.block_ids(request))
            consumer.abort(request)
            consumer.step()  # before the producer does anything else
            await pair.ended(f"a{number}")
            await consumer.until(lambda: not consumer.quarantined)
            free = pool.get_new_blocks(pool.num_free_blocks)
            pool.free_blocks(block for block in free if block.block_id not in block_ids)
            consumer.pool.rows[sorted(block_ids)] = OVERWRITTEN
            watched |= block_ids
        for number in range(NUM_PROMPTS):
            prompt = [1000 * number + token for token in range(len(PROMPT))]
            consumer.finish(await pair.make_handoff(f"b{number}", prompt))
        await pair.drained()
        for side in (pair.consumer, pair.producer):
            await side.connector.stop()
        assert (consumer.pool.rows[sorted(watched)] == OVERWRITTEN).all(), "bytes arrived in blocks that were free"
