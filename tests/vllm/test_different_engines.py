"""Engines that store KV differently: layers apart, other tensor parallelism, other block sizes. Each hands off to each."""

import contextlib
import itertools
import zlib

import pytest

from tests.support.vllm_engine import VllmEngine
from tests.vllm.conftest import Pair, settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

APART, TWO_RANKS, LONG = "layers apart", "two ranks", "long blocks"
ENGINES = {
    APART: {"with_layout": False},
    TWO_RANKS: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    LONG: {"block_size": 64},
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory, tiny_llama):
    folder = tmp_path_factory.mktemp("different-engines")
    with contextlib.ExitStack() as stack:
        made = {}
        for name, arguments in ENGINES.items():
            engine = VllmEngine(folder / name, tiny_llama, extra=settings("tcp"), num_blocks=60, **arguments)
            made[name] = stack.enter_context(engine)
        yield {name: engine.wait() for name, engine in made.items()}


@pytest.fixture
def pair_of(engines, request):
    """Return a function that makes a pair, whose prompts no other test has."""
    return lambda p, d: Pair(engines[p], engines[d], seed=zlib.crc32(request.node.name.encode()))


@pytest.mark.parametrize("num_tokens", [pytest.param(31, marks=pytest.mark.full), 300])
@pytest.mark.parametrize(("p", "d"), list(itertools.permutations(ENGINES, 2)))
def test_each_block_is_verified_and_the_tokens_are_right(pair_of, p, d, num_tokens):
    pair = pair_of(p, d)
    prompt, before = pair.prompt(num_tokens), pair.counts()
    assert pair.answer(prompt, pair.hand_off(prompt)) == pair.reference(prompt)
    after = pair.counts()
    num_ranks, num_sources = (2 if name == TWO_RANKS else 1 for name in (d, p))
    num_blocks = -(-num_tokens // (64 if p == LONG else 32))
    assert after["failures"] == before["failures"]
    assert after["loads"] - before["loads"] == num_ranks
    assert after["verified"] - before["verified"] == num_ranks * num_sources * num_blocks
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(("p", "d", "rank"), [(TWO_RANKS, LONG, 0), (TWO_RANKS, LONG, 1), (APART, TWO_RANKS, 0)])
@pytest.mark.parametrize("how", ["flip_bit", "seal_as"])
def test_one_bad_block_costs_no_token(pair_of, how, p, d, rank):
    pair = pair_of(p, d)
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    generation = {"generation": 10**9} if how == "seal_as" else {}
    pair.p.ask(how, block_id=params["remote_block_ids"][0][4], rank=rank, **generation)
    reason = "stale" if how == "seal_as" else "digest"
    before = pair.counts()["failures"].get(reason, 0)
    assert pair.answer(prompt, params) == pair.reference(prompt)
    assert pair.counts()["failures"][reason] > before
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(("p", "d"), [(TWO_RANKS, APART), (APART, TWO_RANKS)])
def test_a_handoff_used_twice_is_stale_the_second_time(pair_of, p, d):
    pair = pair_of(p, d)
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    tokens = pair.reference(prompt)
    assert pair.answer(prompt, params) == tokens
    pair.assert_nothing_is_held()
    pair.reuse_blocks()
    assert pair.d.ask("reset_prefix_cache")  # else D answers from its own
    before = pair.counts()["failures"].get("stale", 0)
    assert pair.answer(prompt, params) == tokens
    assert pair.counts()["failures"]["stale"] > before
    pair.assert_nothing_is_held()


@pytest.mark.full
def test_layers_that_are_apart_are_read_by_nixl(new_pair):
    pair = new_pair(extra=settings("nixl", kv_verify="digest"), with_layout=False)
    for num_tokens in (1, 33, 300):
        prompt = pair.prompt(num_tokens)
        assert pair.answer(prompt, pair.hand_off(prompt)) == pair.reference(prompt)
    assert pair.counts() == {"loads": 3, "verified": 1 + 2 + 10, "failures": {}}
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    pair.p.ask("flip_bit", block_id=params["remote_block_ids"][0][4])
    assert pair.answer(prompt, params) == pair.reference(prompt)
    assert pair.counts()["failures"] == {"digest": 1}
    pair.assert_nothing_is_held()
