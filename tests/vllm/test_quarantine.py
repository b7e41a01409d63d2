"""Loads over NIXL that end while a read is open: its blocks stay out of use until it cannot write them any more."""

import pytest

from tests.vllm import late_reads
from tests.vllm.conftest import settings, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEADLINE_S = 5.0  # of a load, and again of a late read until its peer is cut off


@pytest.fixture(scope="module")
def late_pair(new_pair):
    """Return a pair whose D keeps reads on command. D has 63 blocks."""
    extra = settings("nixl", transfer_deadline_s=DEADLINE_S)
    return new_pair(extra=extra, environments=({}, {late_reads.VARIABLE: "1"}))


@pytest.fixture
def late(late_pair):
    """Return the pair with an open peer; afterwards it holds nothing."""
    assert_loads(late_pair)
    yield late_pair
    late_pair.assert_nothing_is_held()
    assert_loads(late_pair)


def assert_loads(pair, num_tokens=40):
    """Hand a prompt off: D must use P's blocks."""
    prompt, before = pair.prompt(num_tokens), pair.counts()
    assert pair.answer(prompt, pair.hand_off(prompt)) == pair.reference(prompt)
    after = pair.counts()
    assert (after["loads"], after["failures"]) == (before["loads"] + 1, before["failures"])


def begin(pair):
    """Begin an answer whose load of ten blocks does not end; return its name and prompt."""
    name, prompt = pair.name(), pair.prompt()
    params = pair.hand_off(prompt)
    pair.d.ask("keep_reads", count=1)
    pair.d.ask("add", name=name, prompt=prompt, max_tokens=16, params=params)
    wait_until(lambda: pair.d.ask("num_kept_reads") == 1)
    return name, prompt


def assert_ten_blocks_are_kept(pair):
    usage = pair.d.ask("usage")
    assert (usage["requests"], usage["loading"], usage["quarantined"], usage["used_blocks"]) == (0, 0, 10, 10)


def test_a_load_that_is_given_up_goes_on_in_other_blocks(late):
    name, prompt = begin(late)
    assert_loads(late)  # P is alive: it is not cut off at the deadline
    failures = late.counts()["failures"]
    tokens = late.d.ask("result", name=name)["tokens"]
    assert late.counts()["failures"] == failures | {"deadline": failures.get("deadline", 0) + 1}
    assert_ten_blocks_are_kept(late)
    others = [(late.name(), late.prompt(500)) for _ in range(3)]  # 51 of the 53 blocks that are left
    for other, words in others:
        late.d.ask("add", name=other, prompt=words, max_tokens=40)
    late.d.ask("step", count=6)
    late.d.ask("let_reads_go")  # the late bytes land while these run
    answers = [late.d.ask("result", name=other)["tokens"] for other, _ in others]
    assert answers == [late.reference(words, max_tokens=40) for _, words in others]
    assert tokens == late.reference(prompt)


def test_an_aborted_load_gives_its_blocks_back_when_its_read_ends(late):
    name, _ = begin(late)
    late.d.ask("abort", name=name)
    wait_until(lambda: not late.d.ask("usage")["requests"] and not late.d.ask("usage")["loading"])
    assert_ten_blocks_are_kept(late)
    late.d.ask("let_reads_go")


@pytest.mark.full
def test_a_read_that_does_not_end_is_cut_off(late):
    name, _ = begin(late)
    late.d.ask("abort", name=name)
    wait_until(lambda: late.d.ask("usage")["quarantined"] == 10)
    late.assert_nothing_is_held()
    assert late.d.ask("num_kept_reads") == 0
