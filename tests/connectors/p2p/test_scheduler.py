"""The scheduler side, on real blocks: which blocks are handed off, offered and read, and when they are released."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from connectors.p2p.actions import HandoffRef, LeaseGrant
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.transport.interface import PeerId
from connectors.p2p.worker import P2PConnectorWorker
from connectors.reports import ALL_BLOCKS, LoadEnded, SendingEnded
from connectors.testing.connector_engine import ConnectorEngine
from connectors.testing.memory_pool import small_layout
from core.ids import SeededIds
from core.kv.block import NULL_BLOCK_ID
from core.kv.seals import find_mismatch, layout_fingerprint
from core.request import NewRequest, Request, RequestStatus, SchedulerOutput
from core.testing.clock import FakeClock
from core.wire.kv import KVHandoff
from core.wire.messages import ErrorInfo, TransferUsage
from core.wire.sampling import SamplingParams

BLOCK_SIZE = 32
LAYOUT = small_layout(BLOCK_SIZE)
ERROR = ErrorInfo(code="peer_lost", message="gone", http_status=502)


class Side:
    """One worker's scheduler side on a real manager; ``news`` is its message to its worker side in the last step."""

    def __init__(self, identity) -> None:
        self.grants: list[LeaseGrant] = []
        self.submitted: list[P2PConnectorMetadata] = []
        self.connector = P2PConnectorScheduler(
            identity, lease_ms=30_000, ids=SeededIds(3), grant=self.grants.append, now=FakeClock().now
        )
        self.connector.control_address = "tcp://10.0.0.1:5600"
        self.worker = P2PConnectorWorker(self.submitted.append)
        self.engine = ConnectorEngine(self.connector, self.worker, identity.model_fingerprint, LAYOUT)

    def step(self) -> P2PConnectorMetadata:
        """Run an empty step and return the message to the worker side; an empty one if there is none."""
        self.submitted.clear()
        self.engine.step()
        assert len(self.submitted) <= 1
        return self.submitted[0] if self.submitted else P2PConnectorMetadata()

    def end_load(self, request_id: str, error: ErrorInfo | None = None) -> P2PConnectorMetadata:
        """Let a load end, apply it, and return the news of the step after."""
        self.worker.report(LoadEnded(request_id, TransferUsage(), error, ALL_BLOCKS if error else ()))
        self.step()
        return self.step()

    def request(self, request_id: str, prompt: list[int], handoff: KVHandoff | None, cache_salt: str = "") -> Request:
        new = NewRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=8),
            output_token_ids=(7,),
            kv_handoff=handoff,
            cache_salt=cache_salt,
        )
        request = Request(new, self.engine.hasher)
        self.connector.on_new_request(request)
        return request


@pytest.fixture
async def producer(make_identity) -> Iterator[Side]:
    side = Side(make_identity("prefill-0", 42, layout=LAYOUT))
    yield side
    side.engine.close()


@pytest.fixture
async def consumer(make_identity) -> Iterator[Side]:
    side = Side(make_identity("decode-0", 77, layout=LAYOUT))
    yield side
    side.engine.close()


def expected_seals(pull):
    return [seal for unit in pull.units for seal in unit.expected]


def prompt_of(num_tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_tokens))


def ref_of(handoff: KVHandoff) -> HandoffRef:
    return HandoffRef(handoff.transfer_id, PeerId(handoff.control_address, handoff.incarnation))


# ---- producer


@pytest.mark.parametrize("num_tokens", [1, 15, 31, 32, 33, 64, 70, 96])
async def test_handoff_describes_exactly_the_prompts_tokens(producer, num_tokens):
    prompt = prompt_of(num_tokens)
    handoff = producer.engine.prefill("r", prompt)
    (group,) = handoff.groups
    blocks = producer.engine.manager.block_pool.blocks
    assert handoff.num_tokens == num_tokens
    assert list(group.block_ids) == producer.engine.manager.get_block_ids("r")[0][: -(-num_tokens // BLOCK_SIZE)]
    assert group.generations == tuple(blocks[block_id].generation for block_id in group.block_ids)
    hasher = producer.engine.hasher
    request = producer.engine.parked["r"]
    ends = [min(end, num_tokens) for end in range(BLOCK_SIZE, num_tokens + BLOCK_SIZE, BLOCK_SIZE)]
    assert list(group.block_hashes) == [hasher.prefix_hash(request.block_hashes, request.all_token_ids, end) for end in ends]


async def test_handoff_leaves_out_the_block_of_the_sampled_token(producer):
    """A prompt of whole blocks: the first token's block, if it was allocated, holds nothing of the prompt."""
    request = Request(
        NewRequest(request_id="r", prompt_token_ids=prompt_of(64), sampling=SamplingParams(max_tokens=1), needs_handoff=True),
        producer.engine.hasher,
    )
    assert producer.engine.manager.allocate_slots(request, 65) is not None
    request.num_computed_tokens = 65
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    is_kept, handoff = producer.connector.request_finished(request, producer.engine.manager.get_block_ids("r"))
    assert is_kept
    assert len(producer.engine.manager.get_block_ids("r")[0]) == 3
    assert len(handoff.groups[0].block_ids) == 2
    assert producer.grants == [LeaseGrant(handoff.transfer_id, "r", 2)]


async def test_handoff_names_its_producer_and_lease(producer):
    handoff = producer.engine.prefill("r", prompt_of(40))
    assert (handoff.engine_id, handoff.incarnation, handoff.control_address) == ("prefill-0", 42, "tcp://10.0.0.1:5600")
    assert (handoff.model_fingerprint, handoff.layout, handoff.lease_ms) == (b"model", LAYOUT, 30_000)
    assert producer.grants == [LeaseGrant(handoff.transfer_id, "r", 2)]


async def test_every_handoff_has_a_transfer_id_of_its_own(producer):
    first, second = (producer.engine.prefill(name, prompt_of(40)) for name in "ab")
    assert first.transfer_id != second.transfer_id
    assert first.groups[0].block_ids[0] == second.groups[0].block_ids[0]  # a local hit is handed off like any block


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED])
async def test_request_that_ended_well_makes_a_handoff(producer, status):
    assert producer.engine.prefill("r", prompt_of(40), status) is not None
    assert producer.engine.num_used_blocks == 2


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
async def test_request_that_ended_badly_makes_no_handoff(producer, status):
    assert producer.engine.prefill("r", prompt_of(40), status) is None
    assert producer.grants == []
    assert producer.engine.num_used_blocks == 0


async def test_prompt_that_was_not_computed_to_its_end_makes_no_handoff(producer):
    new = NewRequest(request_id="r", prompt_token_ids=prompt_of(40), sampling=SamplingParams(), needs_handoff=True)
    request = Request(new, producer.engine.hasher)
    request.num_computed_tokens = 39
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert producer.connector.request_finished(request, ([1, 2],)) == (False, None)
    assert producer.grants == []


async def test_request_without_a_reader_is_not_kept(producer):
    request = Request(
        NewRequest(request_id="r", prompt_token_ids=prompt_of(40), sampling=SamplingParams()), producer.engine.hasher
    )
    request.num_computed_tokens = 40
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert producer.connector.request_finished(request, ([1, 2],)) == (False, None)


async def test_blocks_are_kept_until_the_lease_ends(producer):
    producer.engine.prefill("r", prompt_of(40))
    producer.step()
    assert producer.engine.num_used_blocks == 2
    producer.worker.report(SendingEnded("r"))
    producer.step()
    assert producer.engine.num_used_blocks == 0


# ---- consumer: offers and reads


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 70])
async def test_whole_handoff_is_read_into_the_requests_blocks(producer, consumer, num_tokens):
    prompt = prompt_of(num_tokens)
    handoff = producer.engine.prefill("p", prompt)
    request = consumer.engine.add("d", prompt, handoff)
    assert consumer.engine.admit(request) == num_tokens
    (pull,) = consumer.step().pulls
    assert pull.remote_rows == handoff.groups[0].block_ids
    assert list(pull.local_rows) == consumer.engine.manager.get_block_ids("d")[0][: len(pull.remote_rows)]
    assert (pull.request_id, pull.handoff, pull.num_tokens) == ("d", ref_of(handoff), num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 32, 33, 70])
async def test_expected_seals_are_exactly_what_the_owner_has_sealed(producer, consumer, num_tokens):
    handoff = producer.engine.prefill("p", prompt_of(num_tokens))
    consumer.engine.admit(consumer.engine.add("d", prompt_of(num_tokens), handoff))
    (pull,) = consumer.step().pulls
    seals, version = producer.engine.pool.seals, layout_fingerprint(LAYOUT)
    for remote, expected in zip(pull.remote_rows, expected_seals(pull), strict=True):
        assert find_mismatch(seals.row(remote), expected, seals.incarnation, version) is None
    assert sum(expected.num_tokens for expected in expected_seals(pull)) == num_tokens


async def test_only_generations_are_taken_from_the_handoff(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(70))
    forged = replaced_group(handoff, generations=(7, 8, 9), group_id=5)
    consumer.engine.admit(consumer.engine.add("d", prompt_of(70), forged))
    (pull,) = consumer.step().pulls
    assert [(seal.generation, seal.group_id) for seal in expected_seals(pull)] == [(7, 0), (8, 0), (9, 0)]


async def test_load_gets_the_deadline_of_its_request(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    request = consumer.request("d", prompt_of(40), handoff)
    request.deadline = 123.0
    consumer.engine.admit(request)
    (pull,) = consumer.step().pulls
    assert pull.deadline == 123.0


async def test_lease_is_held_from_the_arrival_of_the_request(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    consumer.engine.add("d", prompt_of(40), handoff)
    assert consumer.connector.has_pending_push_work()
    news = consumer.step()
    assert (news.holds, news.pulls, news.releases) == ([ref_of(handoff)], [], [])
    assert not consumer.connector.has_pending_push_work()


async def test_question_may_be_repeated_and_the_offer_is_used_once(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(70))
    request = consumer.engine.add("d", prompt_of(70), handoff)
    assert [consumer.connector.get_num_new_matched_tokens(request, hits) for hits in (0, 0, 32, 64)] == [
        (70, True),
        (70, True),
        (38, True),
        (6, True),
    ]
    consumer.engine.admit(request)
    assert consumer.connector.get_num_new_matched_tokens(request, 0) == (0, False)


async def test_request_without_a_handoff_is_offered_nothing(consumer):
    request = consumer.engine.add("d", prompt_of(40), None)
    assert consumer.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert consumer.engine.admit(request) == 0
    assert consumer.step().is_empty()


async def test_second_allocation_after_the_load_asks_for_nothing(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    request = consumer.engine.add("d", prompt_of(40), handoff)
    consumer.engine.admit(request)
    consumer.step()
    consumer.connector.update_state_after_alloc(request, consumer.engine.manager.get_blocks("d"), 0)
    assert consumer.step().is_empty()


async def test_partial_local_hit_reads_only_the_suffix(producer, consumer):
    first = producer.engine.prefill("p1", prompt_of(64))
    warm = consumer.engine.add("d1", prompt_of(64), first)
    consumer.engine.admit(warm)
    consumer.step()
    consumer.end_load("d1")

    longer = prompt_of(64) + prompt_of(40, first=900)
    handoff = producer.engine.prefill("p2", longer)
    request = consumer.engine.add("d2", longer, handoff)
    assert consumer.engine.admit(request) == 40
    (pull,) = consumer.step().pulls
    local_ids = consumer.engine.manager.get_block_ids("d2")[0]
    assert local_ids[:2] == consumer.engine.manager.get_block_ids("d1")[0][:2]
    assert pull.remote_rows == handoff.groups[0].block_ids[2:4]
    assert list(pull.local_rows) == local_ids[2:4]
    assert pull.num_tokens == 40
    assert [seal.block_hash for seal in expected_seals(pull)] == list(handoff.groups[0].block_hashes[2:4])
    assert [seal.num_tokens for seal in expected_seals(pull)] == [32, 8]


async def test_full_local_hit_reads_nothing_and_releases(producer, consumer):
    first = producer.engine.prefill("p1", prompt_of(64))
    warm = consumer.engine.add("d1", prompt_of(64), first)
    consumer.engine.admit(warm)
    consumer.step()
    consumer.end_load("d1")

    handoff = producer.engine.prefill("p2", prompt_of(64))
    request = consumer.engine.add("d2", prompt_of(64), handoff)
    assert consumer.engine.admit(request) == 0
    news = consumer.step()
    assert (news.pulls, news.releases) == ([], [ref_of(handoff)])


async def test_handoff_of_a_salted_prompt_has_its_own_hashes(producer, consumer):
    def salted(side: Side, name: str, salt: str, handoff: KVHandoff | None) -> Request:
        return side.request(name, prompt_of(40), handoff, salt)

    plain = producer.engine.prefill("plain", prompt_of(40))
    request = Request(
        NewRequest(
            request_id="p", prompt_token_ids=prompt_of(40), sampling=SamplingParams(), needs_handoff=True, cache_salt="tenant"
        ),
        producer.engine.hasher,
    )
    assert producer.engine.manager.allocate_slots(request, 40) is not None
    request.num_computed_tokens = 40
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, handoff = producer.connector.request_finished(request, producer.engine.manager.get_block_ids("p"))
    assert not set(handoff.groups[0].block_hashes) & set(plain.groups[0].block_hashes)

    consumer.engine.admit(salted(consumer, "same", "tenant", handoff))
    consumer.engine.admit(salted(consumer, "other", "another tenant", handoff))
    news = consumer.step()
    assert [pull.request_id for pull in news.pulls] == ["same"]
    assert news.refused["other"].error.code == "stale"


# ---- consumer: refusals


def replaced_group(handoff: KVHandoff, **changed) -> KVHandoff:
    group = msgspec.structs.replace(handoff.groups[0], **changed)
    return msgspec.structs.replace(handoff, groups=(group,))


def wrong_hash(handoff: KVHandoff) -> KVHandoff:
    hashes = handoff.groups[0].block_hashes
    return replaced_group(handoff, block_hashes=(*hashes[:-1], bytes(16)))


def missing_block(handoff: KVHandoff) -> KVHandoff:
    return replaced_group(handoff, block_ids=(NULL_BLOCK_ID, *handoff.groups[0].block_ids[1:]))


def too_few_blocks(handoff: KVHandoff) -> KVHandoff:
    group = handoff.groups[0]
    return replaced_group(
        handoff, block_ids=group.block_ids[:1], generations=group.generations[:1], block_hashes=group.block_hashes[:1]
    )


def with_fields(**changed):
    return lambda handoff: msgspec.structs.replace(handoff, **changed)


@pytest.mark.parametrize(
    ("spoil", "code", "reason"),
    [
        (with_fields(model_fingerprint=b"another"), "layout", "model fingerprint"),
        (with_fields(layout=msgspec.structs.replace(LAYOUT, dtype="float16")), "layout", "dtype float16"),
        (with_fields(num_tokens=41), "stale", "covers 41 of 40"),
        (with_fields(num_tokens=0), "stale", "covers 0 of 40"),
        (with_fields(num_tokens=39), "stale", "hashes"),
        (with_fields(groups=()), "stale", "0 groups"),
        (wrong_hash, "stale", "hashes"),
        (too_few_blocks, "stale", "hashes"),
        (missing_block, "stale", "does not hold"),
    ],
)
async def test_handoff_that_does_not_fit_fails_with_its_reason(producer, consumer, spoil, code, reason):
    handoff = spoil(producer.engine.prefill("p", prompt_of(40)))
    request = consumer.engine.add("d", prompt_of(40), handoff)
    assert consumer.engine.admit(request) == 40
    news = consumer.step()
    assert news.pulls == []
    refusal = news.refused["d"]
    assert (refusal.error.code, refusal.producer) == (code, ref_of(handoff).producer)
    assert reason in refusal.error.message
    after = consumer.end_load("d", ErrorInfo(code=code, message=reason))
    assert after.releases == [ref_of(handoff)]
    assert consumer.engine.num_used_blocks == 0


async def test_handoff_of_another_prompt_is_refused(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    request = consumer.engine.add("d", [*prompt_of(39), 5], handoff)
    consumer.engine.admit(request)
    assert consumer.step().refused["d"].error.code == "stale"


# ---- consumer: letting go


async def test_lease_is_released_when_the_load_has_ended(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    consumer.engine.admit(consumer.engine.add("d", prompt_of(40), handoff))
    assert consumer.step().releases == []
    assert consumer.end_load("d").releases == [ref_of(handoff)]
    assert consumer.step().is_empty()


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
async def test_readers_share_one_lease_until_the_last_has_loaded(producer, consumer, order):
    handoff = producer.engine.prefill("p", prompt_of(40))
    requests = [consumer.engine.add(name, prompt_of(40), handoff) for name in "abc"]
    for request in requests:
        consumer.engine.admit(request)
    news = consumer.step()
    assert (len(news.holds), len(news.pulls)) == (1, 3)
    releases = [consumer.end_load(name).releases for name in order]
    assert releases == [[], [], [ref_of(handoff)]]


async def test_reader_that_fails_does_not_take_the_lease_from_the_others(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    for name in "ab":
        consumer.engine.admit(consumer.engine.add(name, prompt_of(40), handoff))
    consumer.step()
    assert consumer.end_load("a", ERROR).releases == []
    assert consumer.end_load("b").releases == [ref_of(handoff)]


async def test_abort_before_admission_releases_the_handoff(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    request = consumer.engine.add("d", prompt_of(40), handoff)
    consumer.engine.abort(request)
    news = consumer.step()
    assert (news.pulls, news.aborts, news.releases) == ([], [], [ref_of(handoff)])


async def test_reader_that_comes_in_the_step_in_which_the_last_one_left_keeps_the_lease(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    consumer.engine.abort(consumer.engine.add("gone", prompt_of(40), handoff))
    consumer.engine.admit(consumer.engine.add("d", prompt_of(40), handoff))
    news = consumer.step()
    assert ref_of(handoff) in news.holds
    assert ([pull.request_id for pull in news.pulls], news.releases) == (["d"], [])
    assert consumer.end_load("d").releases == [ref_of(handoff)]


async def test_abort_while_loading_releases_when_the_load_has_ended(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    request = consumer.engine.add("d", prompt_of(40), handoff)
    consumer.engine.admit(request)
    consumer.step()
    consumer.engine.abort(request)
    news = consumer.step()
    assert (news.aborts, news.releases) == (["d"], [])
    assert consumer.engine.num_used_blocks == 2  # a transfer may still write them
    assert consumer.end_load("d").releases == [ref_of(handoff)]
    assert consumer.engine.num_used_blocks == 0


async def test_abort_after_the_load_says_nothing_more(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    request = consumer.engine.add("d", prompt_of(40), handoff)
    consumer.engine.admit(request)
    consumer.step()
    consumer.end_load("d")
    consumer.engine.abort(request)
    assert consumer.step().is_empty()


async def test_abort_in_the_step_of_the_request_itself_keeps_the_order(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    request = consumer.engine.add("d", prompt_of(40), handoff)
    consumer.engine.admit(request)
    consumer.engine.abort(request)
    news = consumer.step()
    assert ([pull.request_id for pull in news.pulls], news.aborts, news.releases) == (["d"], ["d"], [])


async def test_abort_of_one_choice_leaves_the_lease_to_the_others(producer, consumer):
    handoff = producer.engine.prefill("p", prompt_of(40))
    requests = [consumer.engine.add(name, prompt_of(40), handoff) for name in "ab"]
    consumer.engine.abort(requests[0])
    assert consumer.step().releases == []
    consumer.engine.admit(requests[1])
    consumer.step()
    assert consumer.end_load("b").releases == [ref_of(handoff)]


async def test_end_of_a_load_that_is_not_ours_is_ignored(consumer):
    output = consumer.engine.worker.get_transfer_results(set())
    output.finished_recving.add("other")
    consumer.connector.update_connector_output(output)
    assert consumer.connector.build_connector_meta(SchedulerOutput()).is_empty()
