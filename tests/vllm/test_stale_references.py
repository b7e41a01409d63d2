"""The public suite of stale references (``connectors.testing.stale_reference_suite``), case by case, on real engines.

The suite drives engines of kvferry; these are the same cases under the same names for a P and a D of vLLM.
"""

from collections import Counter

import pytest

from connectors.testing.stale_reference_suite import REFUSALS, StaleReferenceSuite
from connectors.vllm.handoff_params import Rank
from core.errors import fallback_reason
from tests.support.vllm_engine import REMOTE_DECODE, VllmEngine
from tests.vllm.conftest import settings
from tests.vllm.forged_params import changed, of_version, opened, with_block, with_blocks_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_BLOCKS_OF_P = 40
STALE = {fallback_reason("stale")}


def full(value):
    """Return a parameter for --full only."""
    return pytest.param(value, marks=pytest.mark.full)


@pytest.fixture(params=["nixl", full("tcp")])
def pair(request):
    """Return a pair over each transport, nixl with seals alone, tcp with digests as well; afterwards it holds nothing."""
    found = request.getfixturevalue(f"{request.param}_pair")
    yield found
    found.assert_nothing_is_held()


def noted(pair):
    """Return how often D has refused a handoff or failed a load, by reason."""
    return Counter(pair.counts()["failures"]) + Counter(pair.d.ask("usage")["refused"])


def assert_refused(pair, prompt, params, reasons=REFUSALS):
    """Check that D answers right, uses no block of the reference, and counts it once."""
    assert pair.d.ask("reset_prefix_cache")
    verified, before = pair.counts()["verified"], noted(pair)
    assert pair.num_computed(prompt, params) == len(prompt)
    assert pair.counts()["verified"] == verified
    (reason,) = (noted(pair) - before).elements()
    assert reason in reasons


def test_every_case_of_the_suite_is_here():
    assert {name for name in vars(StaleReferenceSuite) if name.startswith("test_")} <= globals().keys()


def test_a_right_reference_is_used(pair):
    prompt = pair.prompt()
    verified, before = pair.counts()["verified"], noted(pair)
    assert pair.num_computed(prompt, pair.hand_off(prompt)) == 1  # the last one, for its logits
    assert (pair.counts()["verified"] - verified, noted(pair)) == (10, before)


# ---- 1: used up


def test_consumed_reference(pair):
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    pair.answer(prompt, params)
    pair.assert_nothing_is_held()
    assert_refused(pair, prompt, params)


# ---- 2: out of range


@pytest.mark.parametrize("block_id", [NUM_BLOCKS_OF_P, full(2 * NUM_BLOCKS_OF_P - 1), full(2**31 - 1), 0])
def test_out_of_range_reference(pair, block_id):
    """One block is not P's: after its pool, among the landing rows of its seals, far away, or the null block."""
    prompt = pair.prompt()
    assert_refused(pair, prompt, with_block(pair.hand_off(prompt), 1, block_id))


# ---- 3: reused


def test_reference_after_reuse(pair):
    prompt, params = reused(pair)
    assert_refused(pair, prompt, params)


def test_reference_after_reuse_under_a_lease_that_is_good(pair):
    prompt, params = reused(pair)
    good = opened(pair.hand_off(pair.prompt()))
    assert_refused(pair, prompt, changed(params, transfer_id=good.transfer_id), STALE)


def test_reference_after_reuse_that_names_the_new_generations(pair):
    """The parameters of another prompt: everything matches except the prompt of the blocks."""
    prompt, params = reused(pair)
    good = pair.hand_off(pair.prompt())
    assert_refused(pair, prompt, changed(good, prompt_hash=opened(params).prompt_hash), STALE)


def reused(pair):
    """Return a prompt and its handoff, none of whose blocks has its old content."""
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    pair.answer(prompt, params)
    pair.assert_nothing_is_held()
    pair.reuse_blocks()
    return prompt, params


# ---- 4: another incarnation


@pytest.fixture(scope="module")
def next_life(tmp_path_factory, tiny_llama):
    """Yield an engine that stands for P after a restart, with another prompt in its blocks."""
    extra = settings() | {"kvferry.transports": ["nixl", "tcp"]}
    with VllmEngine(tmp_path_factory.mktemp("next-life") / "log", tiny_llama, extra=extra) as engine:
        yield engine.wait()


def handed_off_there(next_life, pair):
    """Return a handoff of the next life, of another prompt."""
    return next_life.generate(pair.name(), pair.prompt(), 1, params=REMOTE_DECODE)["params"]


@pytest.mark.full
def test_reference_of_another_incarnation(pair, next_life):
    """P has restarted: a process at its address holds another prompt."""
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    address = opened(handed_off_there(next_life, pair)).ranks[0].control_address
    moved = changed(params, ranks=(Rank(address, opened(params).ranks[0].incarnation),))
    assert_refused(pair, prompt, moved, STALE)


@pytest.mark.full
@pytest.mark.parametrize("names_its_own_blocks", [False, True])
def test_reference_of_another_incarnation_under_a_lease_that_is_good(pair, next_life, names_its_own_blocks):
    """As above, but the reference claims the present incarnation, and names a handoff that this one holds."""
    prompt = pair.prompt()
    params, there = pair.hand_off(prompt), handed_off_there(next_life, pair)
    forged = changed(there, prompt_hash=opened(params).prompt_hash)
    assert_refused(pair, prompt, forged if names_its_own_blocks else with_blocks_of(forged, params), STALE)


# ---- 5: another prompt


def test_reference_with_another_prompts_hashes(pair):
    prompt, params = pair.prompt(), pair.hand_off(pair.prompt())
    failures = pair.counts()["failures"]
    assert_refused(pair, prompt, params, STALE)
    assert pair.counts()["failures"] == failures, "it was read"


@pytest.mark.parametrize("position", [full(0), 4, full(9)])
def test_reference_with_one_block_of_another_prompt(pair, position):
    """The blocks before the wrong one are right and used; those after it are not."""
    prompt = pair.prompt()
    params, (other,) = pair.hand_off(prompt), opened(pair.hand_off(pair.prompt())).groups
    forged = with_block(params, position, other.block_ids[position], other.generations[position])
    verified, before = pair.counts()["verified"], noted(pair)
    assert pair.num_computed(prompt, forged) == len(prompt) - 32 * position
    assert pair.counts()["verified"] - verified == 9
    assert noted(pair) - before == {fallback_reason("stale"): 1}


def test_handoff_of_another_version_of_the_plugin(pair):
    prompt = pair.prompt()
    assert_refused(pair, prompt, of_version(pair.hand_off(prompt), 2), {"rejected"})
