"""What every KV connector must do: a test class to derive from.

    class TestMine(ConnectorConformance):
        def make_connector(self, role, patience_s):
            return my_connector(...)

Each test drives two connectors of one process, a prefill and a decode worker's, through engines without a model
(``connector_pair``, which also has the model fingerprint, the KV layout and the incarnation of both sides). Imports pytest;
only tests import this module.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
import pytest

from connectors.testing.connector_calls import CallConformance
from connectors.testing.connector_pair import (
    BLOCK_SIZE,
    INCARNATIONS,
    LAYOUT,
    NUM_BLOCKS,
    PROMPT,
    UNTOUCHED,
    Moment,
    Pair,
    Side,
)
from connectors.testing.connector_pairs import PATIENCE_S, PROMPT_BLOCKS
from connectors.testing.memory_pool import small_layout
from core.kv.spec import ceil_div
from core.request import RequestStatus
from core.wire.early import MeetProducer

_OTHER_LAYOUTS = {
    "layers": small_layout(BLOCK_SIZE, num_layers=3),
    "dtype": msgspec.structs.replace(LAYOUT, dtype="int32"),
    "order of the bytes": msgspec.structs.replace(LAYOUT, order="NHD"),
    "heads": msgspec.structs.replace(LAYOUT, num_kv_heads=2, head_dim=LAYOUT.head_dim // 2),
    "layers of other heads": msgspec.structs.replace(LAYOUT, num_layers=1, head_dim=2 * LAYOUT.head_dim),
    "groups": msgspec.structs.replace(LAYOUT, num_groups=2),
}


@pytest.mark.asyncio
class ConnectorConformance(CallConformance):
    """The tests, with those of the two bases: bytes that change (``connector_bytes``), calls that wait (``connector_calls``).

    ``meets_producers`` is True for a connector whose reader prepares for a producer before it has a handoff.
    """

    meets_producers: ClassVar[bool] = False

    # ---- bytes -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 700])
    async def test_blocks_arrive_exactly_and_no_other_is_touched(self, pair: Pair, num_tokens: int) -> None:
        prompt = list(range(num_tokens))
        request = await pair.make_handoff("a", prompt)
        assert pair.consumer.engine.has_content(request)
        written = set(range(NUM_BLOCKS)) - pair.consumer.untouched_rows()
        assert written == set(pair.consumer.block_ids(request)[: ceil_div(num_tokens, BLOCK_SIZE)])
        usage = pair.consumer.engine.loads["a"].usage
        assert usage is not None
        assert usage.transferred_bytes == ceil_div(num_tokens, BLOCK_SIZE) * LAYOUT.block_bytes
        await pair.drained()
        pair.consumer.engine.finish(request)
        await self.assert_consumer_is_empty(pair)

    async def test_blocks_lie_in_another_order_on_each_side(self, pair: Pair) -> None:
        """Without this the other tests would prove nothing."""
        prompt = list(range(10 * BLOCK_SIZE))
        handoff = pair.producer.engine.prefill("a", prompt)
        assert handoff is not None
        request = pair.load("a", prompt, handoff)
        theirs, ours = list(handoff.groups[0].block_ids), pair.consumer.block_ids(request)[:10]
        assert theirs != ours
        assert sorted(theirs) != theirs
        assert sorted(ours) != ours
        await pair.ended("a")
        assert pair.consumer.engine.has_content(request)

    async def test_several_loads_at_once_keep_their_bytes_apart(self, pair: Pair) -> None:
        prompts = {name: [1000 * number + token for token in range(90)] for number, name in enumerate("abcdef")}
        handoffs = {name: pair.producer.engine.prefill(name, prompt) for name, prompt in prompts.items()}
        requests = [pair.load(name, prompts[name], handoffs[name]) for name in reversed(prompts)]
        await pair.ended(*prompts)
        assert all(pair.consumer.engine.has_content(request) for request in requests)
        await pair.drained()

    # ---- local hits ------------------------------------------------------------------------------------------------

    async def test_only_the_suffix_after_a_local_hit_is_read(self, pair: Pair) -> None:
        first = await pair.make_handoff("a", PROMPT)
        pair.consumer.engine.finish(first)
        longer = PROMPT[: 2 * BLOCK_SIZE] + list(range(500, 540))
        request = await pair.make_handoff("b", longer)
        usage = pair.consumer.engine.loads["b"].usage
        assert usage is not None
        assert usage.transferred_bytes == 2 * LAYOUT.block_bytes
        assert pair.consumer.engine.has_content(request)
        await pair.drained()

    async def test_blocks_of_a_local_hit_are_not_written(self, pair: Pair) -> None:
        first = await pair.make_handoff("a", PROMPT)
        hits = pair.consumer.block_ids(first)[:3]
        pair.consumer.engine.pool.rows[hits] = UNTOUCHED
        await pair.make_handoff("b", [*PROMPT[: 3 * BLOCK_SIZE], 7, 8, 9])
        assert pair.consumer.untouched_rows() >= set(hits)

    async def test_a_full_local_hit_reads_nothing_and_lets_the_producer_go(self, pair: Pair) -> None:
        prompt = list(range(2 * BLOCK_SIZE))
        first = await pair.make_handoff("a", prompt)
        handoff = pair.producer.engine.prefill("b", prompt)
        request = pair.consumer.engine.add("b", prompt, handoff)
        assert pair.consumer.engine.admit(request) == 0
        await pair.drained()
        assert "b" not in pair.consumer.engine.loads
        pair.consumer.engine.finish(first)
        pair.consumer.engine.finish(request)
        await self.assert_consumer_is_empty(pair)

    # ---- offers ----------------------------------------------------------------------------------------------------

    async def test_asking_again_before_admission_changes_nothing(self, pair: Pair) -> None:
        request = pair.consumer.engine.add("a", PROMPT, pair.producer.engine.prefill("a", PROMPT))
        for _ in range(3):
            answer = pair.consumer.connector.scheduler.get_num_new_matched_tokens(request, 0)
            assert answer == (len(PROMPT), True)
            await pair.producer.settle()
            await pair.consumer.settle()
        answer = pair.consumer.connector.scheduler.get_num_new_matched_tokens(request, BLOCK_SIZE)
        assert answer == (len(PROMPT) - BLOCK_SIZE, True)
        pair.consumer.engine.admit(request)
        await pair.ended("a")
        assert pair.consumer.engine.has_content(request)

    async def test_a_handoff_that_was_expected_is_loaded_like_any_other(self, pair: Pair) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        assert handoff is not None
        pair.consumer.connector.expect(handoff)
        request = pair.load("a", PROMPT, handoff)
        await pair.ended("a")
        assert pair.consumer.engine.loads["a"].error is None
        assert pair.consumer.engine.has_content(request)
        await pair.drained()
        pair.consumer.engine.finish(request)
        await self.assert_consumer_is_empty(pair)

    async def test_a_producer_that_was_met_is_loaded_from_like_any_other(self, pair: Pair) -> None:
        consumer, producer = pair.consumer.connector, pair.producer.connector
        assert consumer.meets_producers == self.meets_producers
        assert bool(producer.control_address) >= self.meets_producers
        known = INCARNATIONS["prefill"]
        for incarnation in (known, known, known + 1):
            consumer.meet(MeetProducer(engine_id="producer", incarnation=incarnation, control_address=producer.control_address))
        await pair.producer.settle()
        await pair.consumer.settle()
        assert pair.consumer.untouched_rows() == set(range(NUM_BLOCKS))
        request = await pair.make_handoff("a", PROMPT)
        assert pair.consumer.engine.has_content(request)
        await pair.drained()
        pair.consumer.engine.finish(request)
        await self.assert_consumer_is_empty(pair)

    async def test_a_request_that_was_expected_and_never_comes_touches_no_block(self, pair: Pair) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        assert handoff is not None
        pair.consumer.connector.expect(handoff)
        await pair.producer.settle()
        await pair.consumer.settle()
        await self.assert_consumer_is_empty(pair)
        assert pair.consumer.untouched_rows() == set(range(NUM_BLOCKS))
        pair.consumer.engine.abort(pair.consumer.engine.add("another", PROMPT, handoff))  # releases the producer's blocks
        await pair.drained()

    async def test_a_handoff_is_offered_once(self, pair: Pair) -> None:
        request = await pair.make_handoff("a", PROMPT)
        scheduler, engine = pair.consumer.connector.scheduler, pair.consumer.engine
        scheduler.update_state_after_alloc(request, engine.manager.get_blocks("a"), 0)  # it starts to run
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        scheduler.update_state_after_alloc(request, engine.manager.get_blocks("a"), 0)  # it resumes after a preemption
        await self.assert_ended_once(pair, "a")
        await pair.drained()

    async def test_a_request_without_handoff_is_ignored(self, pair: Pair) -> None:
        request = pair.consumer.engine.add("a", PROMPT, None)
        assert pair.consumer.engine.admit(request) == 0
        await pair.consumer.settle()
        pair.consumer.engine.finish(request)
        await self.assert_consumer_is_empty(pair)

    async def test_requests_share_a_handoff_until_the_last_has_used_it(self, pair: Pair) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        requests = [pair.consumer.engine.add(f"a/{index}", PROMPT, handoff) for index in range(4)]
        for request in requests[:3]:
            pair.consumer.engine.admit(request)  # the last waits for its turn
            await pair.ended(request.request_id)
            pair.producer.engine.step()
            if self.holds_until_read:
                assert pair.producer.engine.parked.keys() == {"a"}
            else:  # the bytes may be there a moment before the report that they are
                await pair.producer.engine.until(lambda: not pair.producer.engine.parked)
            assert pair.consumer.engine.has_content(request)
        pair.consumer.engine.abort(requests[3])
        await pair.drained()
        for request in requests[:3]:
            pair.consumer.engine.finish(request)
        await self.assert_consumer_is_empty(pair)

    async def test_requests_load_a_shared_handoff_at_the_same_time(self, pair: Pair) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        requests = [pair.load(f"a/{index}", PROMPT, handoff) for index in range(3)]
        await pair.ended(*(request.request_id for request in requests))
        assert all(pair.consumer.engine.has_content(request) for request in requests)
        await pair.drained()

    # ---- ends before their time ------------------------------------------------------------------------------------

    async def test_abort_before_admission_leaves_nothing(self, pair: Pair) -> None:
        request = pair.consumer.engine.add("a", PROMPT, pair.producer.engine.prefill("a", PROMPT))
        await pair.consumer.settle()
        pair.consumer.engine.abort(request)
        await pair.drained()
        await self.assert_consumer_is_empty(pair)

    @pytest.mark.parametrize("moment", [None, "no bytes", 0, 1, 3, 10, 100, "first bytes"])
    async def test_abort_while_loading_leaves_nothing(self, pair: Pair, moment: Moment | None) -> None:
        """None: not even a step lies between the start of the load and the abort."""
        if moment is None:
            request = pair.load("a", PROMPT, pair.producer.engine.prefill("a", PROMPT))
        else:
            request = await pair.load_until(moment, "a", PROMPT)
        pair.consumer.engine.abort(request)
        assert pair.consumer.engine.num_used_blocks == PROMPT_BLOCKS, "blocks are free while bytes may still arrive"
        await pair.ended("a")
        assert pair.consumer.engine.loads["a"].error is None
        await self.assert_ended_once(pair, "a")
        await pair.drained()
        await self.assert_consumer_is_empty(pair)

    async def test_abort_of_a_load_that_makes_no_progress_ends_it(self, pair: Pair) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        await pair.producer.connector.stop()
        request = pair.load("a", PROMPT, handoff)
        pair.consumer.engine.step()
        pair.consumer.engine.abort(request)
        await pair.consumer.engine.until(lambda: pair.consumer.engine.loads["a"].is_ended, PATIENCE_S / 2)
        assert pair.consumer.engine.loads["a"].error is None, "the request has ended"
        await self.assert_consumer_is_empty(pair)

    async def test_abort_of_one_load_spares_the_others_of_its_handoff(self, pair: Pair) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        first, second = (pair.load(f"a/{index}", PROMPT, handoff) for index in range(2))
        pair.consumer.engine.step()
        pair.consumer.engine.abort(first)
        await pair.ended("a/0", "a/1")
        assert pair.consumer.engine.loads["a/1"].error is None
        assert pair.consumer.engine.has_content(second)
        await pair.drained()

    async def test_abort_after_the_load_leaves_nothing(self, pair: Pair) -> None:
        request = await pair.make_handoff("a", PROMPT)
        pair.consumer.engine.abort(request)
        await pair.drained()
        await self.assert_consumer_is_empty(pair)

    async def test_a_prompt_whose_computation_was_aborted_makes_no_handoff(self, pair: Pair) -> None:
        assert pair.producer.engine.prefill("a", PROMPT, RequestStatus.FINISHED_ABORTED) is None
        assert not pair.producer.engine.parked
        await pair.drained()

    # ---- failures --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("is_known", [False, True], ids=["before contact", "after contact"])
    async def test_a_load_from_an_owner_that_is_gone_fails_once_and_leaves_nothing(
        self, impatient: Pair, is_known: bool
    ) -> None:
        if is_known:
            impatient.consumer.engine.finish(await impatient.make_handoff("before", [1, 2, 3]))
        handoff = impatient.producer.engine.prefill("a", PROMPT)
        await impatient.producer.connector.stop()
        impatient.load("a", PROMPT, handoff)
        await impatient.consumer.engine.until(lambda: impatient.consumer.engine.loads["a"].is_ended)
        await self.assert_failed(impatient, "a")

    @pytest.mark.parametrize("wrong", ["prompt", "model", "order of the blocks", *_OTHER_LAYOUTS])
    async def test_a_handoff_of_something_else_is_refused_and_released(self, pair: Pair, wrong: str) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        assert handoff is not None
        (group,) = handoff.groups
        swapped = msgspec.structs.replace(group, block_hashes=group.block_hashes[::-1])
        changed = {
            "prompt": handoff,
            "model": msgspec.structs.replace(handoff, model_fingerprint=b"other"),
            "order of the blocks": msgspec.structs.replace(handoff, groups=(swapped,)),
            **{name: msgspec.structs.replace(handoff, layout=layout) for name, layout in _OTHER_LAYOUTS.items()},
        }[wrong]
        pair.load("a", [*PROMPT[:-1], 7] if wrong == "prompt" else PROMPT, changed)
        await pair.ended("a")
        await self.assert_failed(pair, "a")
        assert pair.consumer.untouched_rows() == set(range(NUM_BLOCKS))
        await pair.drained()

    @pytest.mark.parametrize("is_aborted", [False, True])
    async def test_a_request_whose_load_failed_continues_without_it(self, pair: Pair, is_aborted: bool) -> None:
        """A failed load is not offered again: a request that computes its prompt here must complete."""
        handoff = pair.producer.engine.prefill("a", PROMPT)
        engine = pair.consumer.engine
        engine.recomputes = True
        request = pair.load("a", [*PROMPT[:-1], 7], handoff)
        await pair.ended("a")
        assert engine.loads["a"].error is not None
        if is_aborted:
            engine.abort(request)
        else:
            assert engine.admit(request) == 0
            await self.assert_ended_once(pair, "a")
            engine.finish(request)
        await pair.drained()
        await self.assert_consumer_is_empty(pair)

    async def test_blocks_of_a_load_are_in_quarantine_or_never_written_again(self, pair: Pair) -> None:
        """At any end of a load, its report decides which of its blocks other requests may use at once."""
        engine = pair.consumer.engine
        moments: tuple[Moment, ...] = ("no bytes", 0, 1, 2, 5, 20, 100, "first bytes")
        for number, moment in enumerate(moments):
            name = f"a{number}"
            request = await pair.load_until(moment, name, PROMPT)
            block_ids = pair.consumer.block_ids(request)
            engine.abort(request)
            engine.step()  # before the producer does anything else
            await pair.ended(name)
            free = sorted(set(block_ids) - engine.quarantined)
            engine.pool.rows[free] = number
            await pair.drained()
            await self.assert_consumer_is_empty(pair)
            assert (engine.pool.rows[free] == number).all(), "bytes arrived in blocks that were free"

    async def test_a_failed_load_spares_the_next(self, pair: Pair) -> None:
        handoff = pair.producer.engine.prefill("a", PROMPT)
        pair.load("a/0", [*PROMPT[:-1], 7], handoff)
        second = pair.load("a/1", PROMPT, handoff)
        await pair.ended("a/0", "a/1")
        assert pair.consumer.engine.loads["a/0"].error is not None
        assert pair.consumer.engine.loads["a/1"].error is None
        assert pair.consumer.engine.has_content(second)
        await pair.drained()

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def test_empty_steps_say_nothing(self, pair: Pair) -> None:
        for side in (pair.producer, pair.consumer):
            for _ in range(10):
                output = side.engine.step()
                assert not output.finished_sending
                assert not output.finished_recving
                assert not output.failed_recving
            assert not side.connector.scheduler.has_pending_push_work()

    async def test_an_idle_engine_need_not_step(self, pair: Pair) -> None:
        await pair.make_handoff("a", PROMPT)
        await pair.drained()
        for side in (pair.producer, pair.consumer):
            assert not side.connector.scheduler.has_pending_push_work()
            assert not side.connector.scheduler.has_pending_block_frees()

    async def test_ending_twice_does_no_harm(self, pair: Pair) -> None:
        await pair.make_handoff("a", PROMPT)
        for side in (pair.producer, pair.consumer):
            for _ in range(2):
                side.connector.scheduler.shutdown()
                side.connector.worker.shutdown()
                await side.connector.stop()

    async def test_ends_in_the_middle_of_a_load(self, pair: Pair) -> None:
        pair.load("a", PROMPT, pair.producer.engine.prefill("a", PROMPT))
        pair.consumer.engine.step()
        await asyncio.sleep(0)
        await pair.consumer.connector.stop()
        await pair.producer.connector.stop()

    async def test_a_connector_that_never_started_can_be_stopped(self) -> None:
        side = Side("decode", self.make_connector("decode", PATIENCE_S))
        await side.close()
