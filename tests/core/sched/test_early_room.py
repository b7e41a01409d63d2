"""Random histories of early pulls in tiny pools: they stay only if no request could be admitted instead of them."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.kv.invariants import find_violations
from core.sched import admission
from core.sched.early_loading import give_way
from core.testing.hash_model import FULL, HashAttention
from core.testing.scripted_loads import Remote
from tests.core.sched.conftest import World
from tests.core.sched.test_early_loading import announce

pytestmark = pytest.mark.slow

KINDS = [*["announce", "arrive"] * 4, *["step"] * 3, *["add"] * 2, "load", "follow", "fail", "abort"]
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(1, 12)), min_size=8, max_size=40)


class History:
    """One engine and its requests. All prompts begin with the same 48 tokens, those of a family are prefixes of each other."""

    def __init__(self, **config) -> None:
        self.world = World(with_connector=True, max_model_len=256, **config)
        self.num_requests = 0

    def prompt(self, family: int, num_tokens: int) -> list[int]:
        return [*self.world.prompt(48), *self.world.prompt(220, seed=10 + family)][:num_tokens]

    def happen(self, event: str, family: int, size: int) -> None:
        world, name = self.world, f"f{family}/early"
        if event == "announce":
            begun = world.scheduler.state.early_pulls.num_begun
            num_tokens = 16 * min(size, 3 + family)
            for number in range(begun, begun + 4):  # whichever round it is in
                world.script.remote[f"{name}/{number}"] = Remote(num_tokens)
            announce(world, self.prompt(family, 16 * (3 + family) + 5), num_tokens, name=name)
        elif event in {"add", "load", "follow"}:
            request_id = f"r{self.num_requests}"
            self.num_requests += 1
            prompt = self.prompt(family, min(16 * size + 5, world.scheduler.max_model_len - 1))
            if event == "load":
                world.script.remote[request_id] = Remote(len(prompt))
            world.add(request_id, prompt, max_tokens=2 * size, early_pull=name if event == "follow" else "")
        elif event in {"arrive", "fail"} and world.script.loading:
            request_id = sorted(world.script.loading)[size % len(world.script.loading)]
            if world.status(request_id).is_finished:
                world.end_load(request_id)
            elif event == "fail":
                world.fail_load(request_id)
            else:
                world.complete_load(request_id)
        elif event == "abort":
            world.abort(name if size < 6 else f"r{size}")
        for _ in range(size if event == "step" else 1):
            world.step()
        assert find_violations(world.manager, world.held_blocks()) == []


@pytest.fixture
def refusals(monkeypatch):
    """Where early pulls would not suffice, let them all give way, and see that the request still lacks blocks."""
    judge, seen = admission._early_pulls_suffice, []

    def check(state, request, prefix, num_computed_tokens):
        suffices = judge(state, request, prefix, num_computed_tokens)
        if state.early_pulls.rounds() and not suffices:
            while give_way(state, request):
                pass
            assert not admission._allocate(state, request, prefix, 0 if prefix.load_kv_async else 1)
            seen.append(request.request_id)
        return suffices

    monkeypatch.setattr(admission, "_early_pulls_suffice", check)
    return seen


@pytest.mark.parametrize("attentions", [FULL, (HashAttention(), HashAttention(window=20))])
def test_no_request_is_refused_blocks_that_early_pulls_could_give(refusals, attentions):
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(num_blocks=st.integers(9, 26), watermark=st.sampled_from([0.0, 0.1]), events=EVENTS)
    def run(num_blocks, watermark, events):
        history = History(num_blocks=num_blocks, watermark=watermark, attentions=attentions, max_num_seqs=4)
        for event in events:
            history.happen(*event)

    run()
    assert refusals, "no history has come to the question"
