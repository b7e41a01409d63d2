"""The model without weights: right tokens from the right KV, other tokens from any other."""

from array import array

import pytest

from core.connector import KVConnectorWorker
from core.kv.seals import ExpectedSeal, decode_seal
from core.request import CachedRequestData, KVConnectorMetadata, KVConnectorOutput, NewRequestData, SchedulerOutput
from core.testing.hash_model import SLOT_BYTES, HashModel, expected_kv, expected_tokens, hash_model_region
from core.wire.sampling import SamplingParams

PROMPT = list(range(100, 110))
BLOCK_SIZE = 4


def new(request_id: str, token_ids: list[int], block_ids: list[int], num_computed_tokens: int = 0) -> NewRequestData:
    return NewRequestData(
        request_id, array("i", token_ids), len(token_ids), SamplingParams(), 0, (block_ids,), num_computed_tokens
    )


def first_step(request_id: str, token_ids: list[int], block_ids: list[int], num_computed_tokens: int = 0, num: int = 0):
    num_tokens = num or len(token_ids) - num_computed_tokens
    return SchedulerOutput(
        scheduled_new_reqs=[new(request_id, token_ids, block_ids, num_computed_tokens)],
        num_scheduled_tokens={request_id: num_tokens},
    )


def next_step(request_id: str, num_computed_tokens: int, num_tokens: int = 1, new_block_ids: list[int] | None = None):
    blocks = None if new_block_ids is None else (new_block_ids,)
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData([request_id], [blocks], [num_computed_tokens]),
        num_scheduled_tokens={request_id: num_tokens},
    )


def decode(model: HashModel, request_id: str, num_computed_tokens: int, num_steps: int) -> list[int]:
    tokens = []
    for step in range(num_steps):
        output = model.execute_model(next_step(request_id, num_computed_tokens + step))
        tokens += output.sampled_token_ids[request_id]
    return tokens


@pytest.fixture
def model() -> HashModel:
    return HashModel(16, BLOCK_SIZE)


@pytest.fixture
def filled(model) -> HashModel:
    """Blocks 1, 2, 3 and room in 4 hold PROMPT of request "a"; one token is sampled."""
    model.execute_model(first_step("a", PROMPT, [1, 2, 3, 4]))
    return model


def test_tokens_are_a_function_of_the_sequence(model):
    output = model.execute_model(first_step("a", PROMPT, [3, 1, 2, 9]))
    tokens = output.sampled_token_ids["a"] + decode(model, "a", 10, 5)
    assert tokens == expected_tokens(PROMPT, 6)
    assert tokens != expected_tokens([*PROMPT[:-1], 7], 6)


def test_chunks_make_no_difference(model):
    assert model.execute_model(first_step("a", PROMPT, [5, 6, 7], num=3)).sampled_token_ids == {}
    assert model.execute_model(next_step("a", 3, 4)).sampled_token_ids == {}
    output = model.execute_model(next_step("a", 7, 3))
    assert output.sampled_token_ids["a"] == expected_tokens(PROMPT, 1)


def test_cached_prefix_gives_the_same_tokens(filled):
    output = filled.execute_model(first_step("b", PROMPT, [1, 2, 8], num_computed_tokens=8))
    assert output.sampled_token_ids["b"] == expected_tokens(PROMPT, 1)


@pytest.mark.parametrize("position", range(10))
def test_any_corrupt_slot_changes_the_tokens(filled, position):
    block_id, slot = 1 + position // BLOCK_SIZE, position % BLOCK_SIZE
    filled.rows[block_id, slot * SLOT_BYTES] ^= 1
    assert decode(filled, "a", 10, 1) != expected_tokens(PROMPT, 2)[1:]


@pytest.mark.parametrize("block_ids", [[2, 1, 3, 4], [1, 2, 9, 4], [1, 1, 3, 4], [9, 2, 3, 4]])
def test_wrong_or_unwritten_block_changes_the_tokens(filled, block_ids):
    first = expected_tokens(PROMPT, 1)
    output = filled.execute_model(first_step("b", [*PROMPT, *first], block_ids, num_computed_tokens=10))
    assert output.sampled_token_ids["b"] != expected_tokens(PROMPT, 2)[1:]


def test_block_reused_by_another_request_changes_the_tokens(filled):
    filled.execute_model(first_step("b", [5, 6], [2]))
    assert decode(filled, "a", 10, 1) != expected_tokens(PROMPT, 2)[1:]


def test_copied_blocks_continue_on_another_model(filled):
    reader = HashModel(16, BLOCK_SIZE)
    for source, target in ((1, 7), (2, 8), (3, 9)):
        reader.write_block(target, filled.read_block(source))
    first = expected_tokens(PROMPT, 1)
    output = reader.execute_model(first_step("a", [*PROMPT, *first], [7, 8, 9], num_computed_tokens=10))
    assert output.sampled_token_ids["a"] == expected_tokens(PROMPT, 2)[1:]


def test_connectors_see_the_pool_as_contiguous_blocks(filled):
    region = filled.region
    assert (region.num_blocks, region.block_bytes) == (16, BLOCK_SIZE * SLOT_BYTES)
    assert region.layout.block_bytes == region.block_bytes
    layout = region.layout
    assert layout.num_layers * 2 * layout.block_size * layout.num_kv_heads * layout.head_dim * 4 == region.block_bytes
    start = 2 * region.block_bytes
    assert bytes(region.buffer[start : start + region.block_bytes]) == filled.read_block(2)
    region.buffer[start] ^= 255
    assert decode(filled, "a", 10, 1) != expected_tokens(PROMPT, 2)[1:]


def test_seals_hold_digests_of_the_bytes_where_they_are_wanted():
    region = hash_model_region(4, BLOCK_SIZE, digest=sum)
    model = HashModel(4, BLOCK_SIZE, region=region)
    model.rows[2] = 3
    model.seals.seal(2, ExpectedSeal(1, 0, bytes(16), BLOCK_SIZE))
    assert decode_seal(model.seals.row(2)).digest == 3 * BLOCK_SIZE * SLOT_BYTES


def test_cache_of_a_sequence_is_known_without_blocks(filled):
    held = b"".join(filled.read_block(block_id) for block_id in (1, 2, 3))
    assert held[: len(PROMPT) * SLOT_BYTES] == expected_kv(PROMPT)


def test_new_blocks_are_appended_to_the_table(model):
    model.execute_model(first_step("a", PROMPT[:4], [1]))
    output = model.execute_model(next_step("a", 4, new_block_ids=[6]))
    assert output.sampled_token_ids["a"] == expected_tokens(PROMPT[:4], 2)[1:]


def test_finished_and_preempted_requests_leave_the_batch(filled):
    filled.execute_model(first_step("b", [5], [9]))
    assert filled.request_ids == ["a", "b"]
    filled.execute_model(SchedulerOutput(finished_req_ids={"a"}, preempted_req_ids={"b"}))
    assert filled.request_ids == []


def test_tokens_stay_inside_the_vocabulary():
    assert set(expected_tokens(PROMPT, 200, vocab_size=5)) == set(range(5))


class RecordingWorker(KVConnectorWorker):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def register_kv_caches(self, pool):
        self.calls.append("register")

    def handle_preemptions(self, metadata):
        self.calls.append("preemptions")

    def start_load_kv(self, metadata):
        self.calls.append("load")

    def wait_for_save(self):
        self.calls.append("save")

    def get_transfer_results(self, finished_req_ids):
        self.calls.append(f"results {sorted(finished_req_ids)}")
        return KVConnectorOutput(finished_sending={"x"} if finished_req_ids else set())

    def get_block_ids_with_load_errors(self):
        self.calls.append("errors")
        return set()


def test_connector_runs_its_sequence_in_empty_steps_too():
    worker = RecordingWorker()
    model = HashModel(4, BLOCK_SIZE, worker)
    output = model.execute_model(SchedulerOutput(kv_connector_metadata=KVConnectorMetadata()))
    assert worker.calls == ["register", "preemptions", "load", "save", "results []", "errors"]
    assert output.kv_connector_output is None


def test_report_of_the_connector_comes_with_the_output():
    model = HashModel(4, BLOCK_SIZE, RecordingWorker())
    output = model.execute_model(SchedulerOutput(finished_req_ids={"a"}, kv_connector_metadata=KVConnectorMetadata()))
    assert output.kv_connector_output.finished_sending == {"x"}
