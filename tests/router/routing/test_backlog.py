"""The router's picture of one worker's queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.backlog import Backlog, QueuedPrompt


def prompt(predicted_ms, due_ms, num_new_tokens=10):
    return QueuedPrompt(num_new_tokens, predicted_ms, due_ms)


def test_a_prompt_waits_for_the_running_one_and_those_due_earlier():
    backlog = Backlog()
    backlog.add("running", prompt(100, due_ms=400), 0)
    backlog.add("early", prompt(50, due_ms=200), 0)
    backlog.add("late", prompt(70, due_ms=900), 0)
    assert backlog.place_of(500, now_ms=0) == (150, 1)


def test_the_running_prompt_counts_for_what_is_left_of_it():
    backlog = Backlog()
    backlog.add("running", prompt(100, 0), 0)
    assert backlog.work_ms(30) == 70
    assert backlog.work_ms(500) == 0


def test_a_completion_corrects_the_wait():
    backlog = Backlog()
    backlog.add("a", prompt(100, 0), 0)
    backlog.add("b", prompt(40, 1), 0)
    assert backlog.work_ms(300) == 40
    backlog.remove("a", 300)
    assert backlog.work_ms(310) == 30


def test_a_waiting_prompt_that_leaves_does_not_make_a_late_one_begin_anew():
    backlog = Backlog()
    for number, name in enumerate("abc"):
        backlog.add(name, prompt(100, number), 0)
    backlog.remove("c", 300, is_computed=False)
    assert backlog.work_ms(300) == 100
    backlog.remove("a", 310, is_computed=False)
    assert backlog.work_ms(330) == 80, "the running one has left: the next begins"


def test_a_prompt_that_is_computed_before_a_late_one_shows_that_it_was_not_begun():
    backlog = Backlog()
    for number, name in enumerate("ab"):
        backlog.add(name, prompt(100, number), 0)
    backlog.remove("b", 300)
    assert backlog.work_ms(310) == 90


def test_the_prompt_due_first_runs_next():
    backlog = Backlog()
    backlog.add("a", prompt(100, 0), 0)
    backlog.add("long", prompt(1000, 4000), 1)
    backlog.add("short", prompt(10, 40), 2)
    backlog.remove("a", 100)
    assert backlog.place_of(0, 105) == (5, 1)


def test_unknown_prompts_are_ignored():
    assert Backlog().remove("never", 5) is None


events = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(0, 500), st.integers(0, 2000)), max_size=40)


@given(events)
def test_tokens_and_wait_are_those_of_the_prompts_left(history):
    backlog, left = Backlog(), {}
    for now, (name, is_added, predicted, due) in enumerate(history):
        if is_added:
            left[name] = prompt(predicted, due, num_new_tokens=predicted)
            backlog.add(name, left[name], now)
        else:
            assert backlog.remove(name, now) == left.pop(name, None)
        assert backlog.num_new_tokens == sum(item.num_new_tokens for item in left.values())
        assert 0 <= backlog.work_ms(now) <= sum(item.predicted_ms for item in left.values())
    for name in left:
        backlog.remove(name, len(history))
    assert backlog.work_ms(10**6) == 0


class PlainBacklog:
    """Looks at every prompt for every question."""

    def __init__(self):
        self.prompts, self.running, self.since = {}, None, 0.0

    def add(self, name, queued, now):
        self.remove(name, now, is_computed=False)
        self.prompts[name] = queued
        if self.running is None:
            self.running, self.since = name, now

    def remove(self, name, now, is_computed):
        queued = self.prompts.pop(name, None)
        if queued is None:
            return
        running = self.prompts.get(self.running)
        if name == self.running or (is_computed and running is not None and now - self.since > running.predicted_ms):
            self.running = min(self.prompts, key=lambda each: self.prompts[each].due_ms, default=None)
            self.since = now

    def place_of(self, due, now, tenant):
        before = {name: each for name, each in self.prompts.items() if name == self.running or each.due_ms <= due}
        left = {name: each.predicted_ms for name, each in before.items()}
        if self.running is not None:
            left[self.running] = max(0.0, left[self.running] - (now - self.since))
        wait, others = sum(left.values()), {}
        for name, each in before.items():
            if tenant is not None and each.tenant != tenant and name != self.running:
                others[each.tenant] = others.get(each.tenant, 0.0) + left[name]
        if others:
            turn = wait - sum(others.values()) + wait / len(self.prompts)
            wait -= sum(max(0.0, other - turn) for other in others.values())
        return max(0.0, wait), len(self.prompts) - len(before)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "add", "remove", "leave")),
        st.integers(0, 7),  # which prompt
        st.floats(0, 500),  # predicted
        st.floats(0, 300),  # patience
        st.integers(0, 2),  # tenant
        st.floats(0, 80),  # time until the next step
    ),
    max_size=40,
)


@pytest.mark.slow
@given(STEPS, st.booleans())
def test_a_wait_is_what_a_look_at_every_prompt_finds(steps, has_patience):
    quick, plain, now = Backlog(), PlainBacklog(), 0.0
    for kind, number, ms, patience, tenant, pause in steps:
        for backlog in (quick, plain):
            if kind == "add":
                queued = QueuedPrompt(10, ms, now + patience * has_patience, tenant)
                backlog.add(f"r{number}", queued, now)
            else:
                backlog.remove(f"r{number}", now, is_computed=kind == "remove")
        now += pause
        for due in (now, now + 150.0, float("inf")):
            for of in (None, 0, 1):
                found, expected = quick.place_of(due, now, of), plain.place_of(due, now, of)
                assert found == (pytest.approx(expected[0], abs=1e-6), expected[1])
    assert quick.prompts == plain.prompts
