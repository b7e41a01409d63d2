"""Engines that seal as on a device: a handoff is leased and published before it is sealed."""

import pytest

from tests.support.vllm_engine import REMOTE_DECODE
from tests.vllm import late_seals
from tests.vllm.conftest import settings
from tests.vllm.test_quarantine import assert_loads

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def late_pair(new_pair):
    return new_pair(extra=settings("tcp"), environments=({late_seals.VARIABLE: "1"}, {}))


@pytest.fixture
def late(late_pair):
    """Return the pair, whose P seals at once until it is told otherwise; afterwards it holds nothing."""
    yield late_pair
    late_pair.p.ask("delay_seals", seconds=0.0)
    late_pair.assert_nothing_is_held()


@pytest.mark.parametrize("num_tokens", [20, 300])
@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_d_waits_for_seals_that_come_soon(late, seconds, num_tokens):
    late.p.ask("delay_seals", seconds=seconds)
    for _ in range(3):
        assert_loads(late, num_tokens)


def test_d_computes_what_is_not_sealed_in_time(late):
    assert_loads(late)  # connected
    late.p.ask("delay_seals", seconds=1.5)
    prompt, failures = late.prompt(), late.counts()["failures"]
    assert late.answer(prompt, late.hand_off(prompt)) == late.reference(prompt)
    assert late.counts()["failures"] == failures | {"stale": failures.get("stale", 0) + 1}


def test_a_handoff_that_ends_before_it_is_sealed_leaves_nothing(late):
    late.p.ask("delay_seals", seconds=0.3)
    prompt = late.prompt()
    for _ in range(3):
        late.p.generate(late.name(), prompt, 2, params=REMOTE_DECODE)  # goes on: no prompt for another engine
        preempted = late.name()
        assert late.p.ask(
            "add_step_and_preempt", name=preempted, count=1, prompt=late.prompt(), max_tokens=2, params=REMOTE_DECODE
        )
        late.p.ask("result", name=preempted)
    late.reuse_blocks()
    assert late.answer(prompt, late.hand_off(prompt)) == late.reference(prompt)
