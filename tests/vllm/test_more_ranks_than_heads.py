"""A model with one KV head, which each of two ranks holds: handed off between engines of one rank and of two."""

import contextlib
import zlib

import pytest

from tests.support.tiny_models import write_tiny_llama
from tests.support.vllm_engine import VllmEngine
from tests.vllm.conftest import Pair, settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.full]

ONE, TWO, OTHER_TWO = "one rank", "two ranks", "two other ranks"
NUM_RANKS = {ONE: 1, TWO: 2, OTHER_TWO: 2}
PAIRS = [(ONE, TWO), (TWO, ONE), (TWO, OTHER_TWO)]
NUM_TOKENS, BLOCK_SIZE, BAD_BLOCK = 300, 32, 4


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one-head")
    model = write_tiny_llama(folder / "model", num_kv_heads=1)
    with contextlib.ExitStack() as stack:
        made = {}
        for name, num_ranks in NUM_RANKS.items():
            ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} if num_ranks == 2 else {}
            engine = VllmEngine(folder / name, model, extra=settings("tcp"), num_blocks=60, **ranks)
            made[name] = stack.enter_context(engine)
        yield {name: engine.wait() for name, engine in made.items()}


@pytest.fixture
def pair_of(engines, request):
    """Return a function that makes a pair, whose prompts no other test has."""
    return lambda p, d: Pair(engines[p], engines[d], seed=zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("num_tokens", [31, NUM_TOKENS])
@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_each_rank_reads_the_head_once_and_the_tokens_are_right(pair_of, p, d, num_tokens):
    pair = pair_of(p, d)
    prompt, before = pair.prompt(num_tokens), pair.counts()
    assert pair.answer(prompt, pair.hand_off(prompt)) == pair.reference(prompt)
    after = pair.counts()
    assert after["failures"] == before["failures"]
    assert after["loads"] - before["loads"] == NUM_RANKS[d]
    assert after["verified"] - before["verified"] == NUM_RANKS[d] * -(-num_tokens // BLOCK_SIZE)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(("p", "d", "rank"), [(ONE, TWO, 0), (TWO, ONE, 0), (TWO, OTHER_TWO, 0), (TWO, OTHER_TWO, 1)])
def test_a_flipped_bit_on_one_rank_costs_the_tokens_from_its_block_on(pair_of, p, d, rank):
    pair = pair_of(p, d)
    prompt = pair.prompt(NUM_TOKENS)
    params = pair.hand_off(prompt)
    pair.p.ask("flip_bit", block_id=params["remote_block_ids"][0][BAD_BLOCK], rank=rank)
    before = pair.counts()["failures"].get("digest", 0)
    assert pair.num_computed(prompt, params) == NUM_TOKENS - BAD_BLOCK * BLOCK_SIZE
    assert pair.counts()["failures"]["digest"] > before
    pair.assert_nothing_is_held()


def test_the_copy_of_a_head_that_is_not_read_need_not_be_right(pair_of):
    pair = pair_of(TWO, ONE)
    prompt = pair.prompt(NUM_TOKENS)
    params = pair.hand_off(prompt)
    pair.p.ask("flip_bit", block_id=params["remote_block_ids"][0][BAD_BLOCK], rank=1)
    before = pair.counts()["failures"]
    assert pair.answer(prompt, params) == pair.reference(prompt)
    assert pair.counts()["failures"] == before
    pair.assert_nothing_is_held()
