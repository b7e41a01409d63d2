"""A request from admission to its last token."""

import pytest

from core.kv.hashing import BlockHasher
from core.request import (
    FINISH_REASONS,
    KVConnectorOutput,
    NewRequest,
    PrefillStats,
    Request,
    RequestStatus,
)
from core.wire.media import MMFeature
from core.wire.messages import ErrorInfo, TransferUsage
from core.wire.sampling import SamplingParams
from tests.support.counted_offset import CountedOffset


@pytest.fixture
def hasher() -> BlockHasher:
    return BlockHasher(b"model", 16)


@pytest.fixture
def make_request(hasher):
    def make(num_prompt: int = 20, output=(), **more) -> Request:
        sampling = more.pop("sampling", SamplingParams(max_tokens=8))
        return Request(
            NewRequest(request_id="r", prompt_token_ids=range(num_prompt), output_token_ids=output, sampling=sampling, **more),
            hasher,
        )

    return make


def test_prompt_and_output_are_counted_apart(make_request):
    request = make_request(20, output=(7, 8))
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (20, 2, 22)
    assert request.all_token_ids.tolist() == [*range(20), 7, 8]
    assert request.output_token_ids == [7, 8]


def test_appended_token_is_counted(make_request):
    request = make_request(20)
    request.append_output_token(9)
    assert (request.num_output_tokens, request.num_tokens) == (1, 21)
    assert request.output_token_ids == [9]


def test_output_is_a_copy(make_request):
    request = make_request(20, output=(7,))
    request.output_token_ids.append(1)
    assert request.output_token_ids == [7]


def test_output_after_many_images_is_hashed_with_few_looks_at_them(make_request, monkeypatch):
    images = [
        MMFeature(identifier=bytes(16), offset=CountedOffset(64 * number), length=40, num_embeds=40, media_index=0)
        for number in range(64)
    ]
    request = make_request(64 * 64, mm_features=images)
    monkeypatch.setattr(CountedOffset, "num_looks", 0)
    for token_id in range(32 * 16):
        request.append_output_token(token_id)
    assert len(request.block_hashes) == 256 + 32
    assert 0 < CountedOffset.num_looks <= 12 * 32, "not 64 for each of 32 blocks"


def test_every_full_run_is_hashed_when_its_last_token_comes(make_request, hasher):
    request = make_request(30)
    assert len(request.block_hashes) == 1
    request.append_output_token(5)
    assert len(request.block_hashes) == 1
    request.append_output_token(6)
    assert request.block_hashes == hasher.hash_request_blocks(request.all_token_ids)
    assert len(request.block_hashes) == 2


def test_hashes_do_not_depend_on_what_is_prompt_and_what_output(make_request):
    assert make_request(32).block_hashes == make_request(20, output=range(20, 32)).block_hashes


def test_salt_changes_every_hash(make_request):
    plain, salted = make_request(48), make_request(48, cache_salt="tenant")
    assert not set(plain.block_hashes) & set(salted.block_hashes)
    for token in range(16):
        salted.append_output_token(token)
    assert len(salted.block_hashes) == 4


def test_request_without_a_hasher_has_no_hashes():
    request = Request(NewRequest(request_id="r", prompt_token_ids=range(40), sampling=SamplingParams()), None)
    request.append_output_token(1)
    assert request.block_hashes == []


def test_prompt_logprobs_forbid_reading_the_prefix_cache(make_request):
    assert make_request(sampling=SamplingParams(prompt_logprobs=0)).skip_reading_prefix_cache
    assert not make_request().skip_reading_prefix_cache


def test_prefill_stats_are_taken_once(make_request):
    request = make_request()
    request.prefill_stats = stats = PrefillStats(20, 16, 3)
    assert stats.num_cached_tokens == 19
    assert request.take_prefill_stats() is stats
    assert request.take_prefill_stats() is None


def test_everything_after_preempted_is_finished():
    assert [status.name for status in RequestStatus if status.is_finished] == [
        "FINISHED_STOPPED",
        "FINISHED_LENGTH_CAPPED",
        "FINISHED_ABORTED",
        "FINISHED_ERROR",
    ]


def test_every_finished_status_has_a_reason():
    assert set(FINISH_REASONS) == {status for status in RequestStatus if status.is_finished}


@pytest.mark.parametrize(
    "output",
    [
        KVConnectorOutput(finished_sending={"a"}),
        KVConnectorOutput(finished_recving={"a"}),
        KVConnectorOutput(invalid_block_ids={1}),
        KVConnectorOutput(failed_recving={"a": ErrorInfo(code="x", message="y")}),
        KVConnectorOutput(transfer_usage={"a": TransferUsage(transport="tcp")}),
    ],
)
def test_connector_report_with_any_news_is_not_empty(output):
    assert KVConnectorOutput().is_empty()
    assert not output.is_empty()
