"""Kinds of engines: tensor parallelism, sliding windows, MLA, and what is refused at start with the reason."""

import pytest

from tests.support.tcp_proxy import TcpProxy
from tests.support.tiny_models import write_tiny_deepseek, write_tiny_gemma
from tests.support.vllm_engine import EngineFailed, VllmEngine
from tests.vllm.conftest import settings, wait_until
from tests.vllm.forged_params import control_address, through

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOW = 64


def full(*values):
    """Return parameters for --full only."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.fixture(scope="module")
def two_ranks(new_pair):
    return new_pair(extra=settings("tcp"), tensor_parallel_size=2, distributed_executor_backend="mp")


def assert_answers_right(pair, prompt, params):
    assert pair.answer(prompt, params) == pair.reference(prompt)


@pytest.mark.parametrize("num_tokens", [33, 300])
def test_each_rank_reads_its_part(two_ranks, num_tokens):
    prompt = two_ranks.prompt(num_tokens)
    before = two_ranks.counts()
    assert_answers_right(two_ranks, prompt, two_ranks.hand_off(prompt))
    after = two_ranks.counts()
    assert after["loads"] - before["loads"] == 2
    assert after["verified"] - before["verified"] == 2 * -(-num_tokens // 32)
    two_ranks.assert_nothing_is_held()


@pytest.mark.parametrize(("how", "rank"), [("flip_bit", 0), ("seal_as", 1), full("flip_bit", 1), full("seal_as", 0)])
def test_one_bad_block_on_one_rank_costs_no_token(two_ranks, rank, how):
    prompt = two_ranks.prompt()
    params = two_ranks.hand_off(prompt)
    generation = {"generation": 10**9} if how == "seal_as" else {}
    two_ranks.p.ask(how, block_id=params["remote_block_ids"][0][4], rank=rank, **generation)
    before = two_ranks.counts()["failures"]
    assert_answers_right(two_ranks, prompt, params)
    reason = "stale" if how == "seal_as" else "digest"
    assert two_ranks.counts()["failures"][reason] == before.get(reason, 0) + 1
    two_ranks.assert_nothing_is_held()


@pytest.mark.parametrize("rank", [full(0), 1])
def test_a_control_connection_that_is_cut_during_a_load_costs_no_token(two_ranks, rank):
    """One rank of D cannot reach its peer any more: the other rank's lease is released, that of the peer ends by itself."""
    pair, prompt, first = two_ranks, two_ranks.prompt(), two_ranks.prompt()
    with TcpProxy(control_address(pair.hand_off(prompt), rank)) as proxy:
        assert_answers_right(pair, first, through(pair.hand_off(first), rank, proxy.address))
        before, name = pair.counts(), pair.name()
        params = through(pair.hand_off(prompt), rank, proxy.address)
        proxy.silence()  # so that this rank's load waits for an answer
        pair.d.ask("add", name=name, prompt=prompt, max_tokens=16, params=params)
        wait_until(lambda: pair.counts()["loads"] == before["loads"] + 1)  # the other rank's
        assert pair.d.ask("usage")["loading"] == 1
    assert pair.d.ask("result", name=name)["tokens"] == pair.reference(prompt)
    failures = before["failures"] | {"peer_lost": before["failures"].get("peer_lost", 0) + 1}
    assert pair.counts()["failures"] == failures
    pair.assert_nothing_is_held()


def test_a_handoff_of_other_weights_is_refused_and_ends_with_them(two_ranks):
    pair, prompt, another = two_ranks, two_ranks.prompt(), two_ranks.prompt()
    old, _ = pair.hand_off(prompt), pair.hand_off(another)
    assert not pair.p.ask("reset_all_caches")  # blocks are in use; it ends the leases
    pair.assert_nothing_is_held()
    with pytest.raises(EngineFailed, match="published nothing"):
        pair.hand_off(prompt)  # of which the prefix cache still has the blocks
    assert pair.p.ask("reset_all_caches")
    before = pair.counts()["failures"].get("stale", 0)
    assert_answers_right(pair, prompt, old)
    assert pair.counts()["failures"]["stale"] == before + 2  # on each rank
    assert_answers_right(pair, prompt, pair.hand_off(prompt))
    assert pair.d.ask("usage")["refused"]["layout"] == 1
    assert pair.d.ask("reset_all_caches")
    prompt, loads = pair.prompt(), pair.counts()["loads"]
    assert_answers_right(pair, prompt, pair.hand_off(prompt))
    assert pair.counts()["loads"] == loads + 2


@pytest.fixture(scope="module")
def windowed(new_pair, tmp_path_factory):
    """Return a pair with full and sliding layers, whose prompts take several steps."""
    model = write_tiny_gemma(tmp_path_factory.mktemp("tiny-gemma"), WINDOW)
    return new_pair(extra=settings("tcp"), model=model, num_blocks=120, max_num_batched_tokens=128)


@pytest.mark.parametrize("num_tokens", [20, 64, 65, 96, 300, 333])
def test_only_the_tail_of_a_window_is_read(windowed, num_tokens):
    prompt = windowed.prompt(num_tokens)
    before = windowed.counts()
    assert_answers_right(windowed, prompt, windowed.hand_off(prompt))
    after = windowed.counts()
    left = max(0, num_tokens - WINDOW + 1) // 32
    assert after["verified"] - before["verified"] == 2 * -(-num_tokens // 32) - left
    windowed.assert_nothing_is_held()


@pytest.mark.parametrize("num_tokens", [95, 127])
def test_a_token_that_vllm_has_left_behind_is_not_guessed(windowed, num_tokens):
    """P frees the block of a token to which D's last token attends: vLLM counts the window one token further."""
    prompt = windowed.prompt(num_tokens)
    before = windowed.d.ask("usage")["refused"].get("stale", 0)
    assert_answers_right(windowed, prompt, windowed.hand_off(prompt))
    assert windowed.d.ask("usage")["refused"]["stale"] == before + 1
    windowed.assert_nothing_is_held()


def test_one_bad_block_of_several_groups_costs_the_whole_load_and_no_token(windowed):
    prompt = windowed.prompt()
    params = windowed.hand_off(prompt)
    windowed.p.ask("flip_bit", block_id=params["remote_block_ids"][1][3])
    assert_answers_right(windowed, prompt, params)
    assert windowed.counts()["failures"] == {"digest": 1}
    windowed.assert_nothing_is_held()


@pytest.fixture(scope="module")
def latent(new_pair, tmp_path_factory):
    """Return a pair with MLA, in vLLM's reference implementation for CPUs: its blocks have 16 tokens.

    vLLM's own kernel for rotary embeddings on CPU gives the queries of MLA other values in a prompt than in a single token.
    """
    model = write_tiny_deepseek(tmp_path_factory.mktemp("tiny-deepseek"))
    arguments = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    return new_pair(extra=settings("tcp"), model=model, num_blocks=120, **arguments)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 300])
def test_latents_are_handed_off(latent, num_tokens):
    prompt = latent.prompt(num_tokens)
    before = latent.counts()
    assert_answers_right(latent, prompt, latent.hand_off(prompt))
    after = latent.counts()
    assert after["loads"] - before["loads"] == 1
    assert after["verified"] - before["verified"] == -(-num_tokens // 16)
    latent.assert_nothing_is_held()


def test_one_bad_block_of_latents_costs_the_tokens_behind_it(latent):
    prompt = latent.prompt()
    params = latent.hand_off(prompt)
    latent.p.ask("flip_bit", block_id=params["remote_block_ids"][0][4])
    before = latent.counts()
    assert latent.num_computed(prompt, params) == 300 - 4 * 16
    after = latent.counts()
    assert after["verified"] - before["verified"] == 18
    assert after["failures"]["digest"] == before["failures"].get("digest", 0) + 1
    latent.assert_nothing_is_held()


@pytest.mark.full  # the windows above beside full attention are the harder case, and more usual
def test_one_bad_block_of_a_window_costs_the_whole_load_and_no_token(new_pair, tmp_path):
    """All layers slide, so there is one group. Tokens from the bad block on attend to blocks that were not read."""
    pair = new_pair(extra=settings("tcp"), model=write_tiny_gemma(tmp_path, WINDOW, has_full_layers=False))
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    assert len(params["remote_block_ids"]) == 1
    pair.p.ask("flip_bit", block_id=params["remote_block_ids"][0][-2])
    assert_answers_right(pair, prompt, params)
    assert pair.counts()["failures"] == {"digest": 1}
    pair.assert_nothing_is_held()


@pytest.mark.full  # the windows above are the harder case: their blocks are in groups of their own
def test_windows_that_vllm_does_not_manage_are_read_as_a_whole(new_pair, tmp_path):
    """One group has the blocks of full and sliding layers, and vLLM calls it full attention with a window."""
    model = write_tiny_gemma(tmp_path, WINDOW)
    pair = new_pair(extra=settings("tcp"), model=model, disable_hybrid_kv_cache_manager=True)
    prompt = pair.prompt()
    assert_answers_right(pair, prompt, pair.hand_off(prompt))
    assert pair.counts() == {"loads": 1, "verified": 10, "failures": {}}
    pair.assert_nothing_is_held()


@pytest.mark.full  # ``test_nothing_is_held`` has a pair in bfloat16
@pytest.mark.parametrize(
    "arguments",
    [{"dtype": "bfloat16", "enable_prefix_caching": False}, {"kv_cache_dtype": "fp8"}],
    ids=["bf16 without prefix caching", "fp8"],
)
def test_kv_of_other_types_is_handed_off(new_pair, arguments):
    pair = new_pair(extra=settings("tcp"), **arguments)
    prompt = pair.prompt()
    assert_answers_right(pair, prompt, pair.hand_off(prompt))
    assert pair.counts() == {"loads": 1, "verified": 10, "failures": {}}
    pair.assert_nothing_is_held()


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("kvferry.lease: no such setting", {"extra": {"kvferry.lease": 3}}),
        full("kvferry.host: 192.0.2.1 can be reached", {"extra": settings(host="192.0.2.1")}),
        full("can be forged", {"prefix_caching_hash_algo": "xxhash_cbor"}),
    ],
)
def test_what_cannot_work_is_refused_at_start(tiny_llama, tmp_path, message, arguments):
    engine = VllmEngine(tmp_path / "log", tiny_llama, **({"extra": settings()} | arguments))
    with engine, pytest.raises(EngineFailed, match=message):
        engine.wait()
