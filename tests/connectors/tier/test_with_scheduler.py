"""A tier with the real scheduler and a model whose tokens change with any wrong byte."""

from __future__ import annotations

import random

import pytest

from connectors.tier import scheduler as scheduler_module
from core.testing.hash_model import HashAttention
from kvstore.base import LookupTicket

HYBRID = (HashAttention(window=20), HashAttention(), HashAttention(window=40))
CHUNKED = (HashAttention(chunk=48), HashAttention())
GROUPS = {"full": (HashAttention(),), "sliding": HYBRID, "chunked": CHUNKED}


def prompt_of(number, length):
    return [1000 * number + position for position in range(length)]


@pytest.mark.parametrize("attentions", GROUPS.values(), ids=GROUPS)
def test_prompt_is_loaded_instead_of_computed_again(tier_engine, attentions):
    engine = tier_engine(attentions=attentions, num_blocks=80)
    engine.add("a", prompt_of(1, 100))
    engine.run()
    engine.forget()
    engine.add("b", prompt_of(1, 100))
    engine.run()
    assert engine.stats["b"].num_external_cached_tokens == 96
    assert engine.usage["b"].transferred_tokens == 96
    stats = engine.core.stats
    assert (stats.num_external_queried_tokens, stats.num_external_hit_tokens) == (2 * 100, 96)
    engine.assert_is_right()
    engine.assert_is_empty()


def test_of_a_sliding_group_only_the_window_is_loaded(tier_engine, store):
    engine = tier_engine(attentions=(HashAttention(window=20), HashAttention()), num_blocks=80)
    engine.add("a", prompt_of(1, 200))
    engine.run()
    engine.forget()
    for key in [key for key in store.blocks if key.group_id == 0][:-4]:
        del store.blocks[key]
    engine.add("b", prompt_of(1, 200))
    engine.run()
    assert engine.stats["b"].num_external_cached_tokens == 192
    assert engine.usage["b"].verified_blocks == 12 + 2
    engine.assert_is_right()


def test_generated_tokens_are_saved_too(tier_engine):
    engine = tier_engine()
    engine.add("a", prompt_of(1, 40), max_tokens=30)
    engine.run()
    engine.forget()
    engine.add("b", [*prompt_of(1, 40), *engine.tokens["a"], 5, 6])
    engine.run()
    assert engine.stats["b"].num_external_cached_tokens == 64
    engine.assert_is_right()


def test_only_prompts_are_saved_if_so_configured(tier_engine):
    engine = tier_engine(saves_output=False)
    engine.add("a", prompt_of(1, 40), max_tokens=30)
    engine.run()
    engine.forget()
    engine.add("b", [*prompt_of(1, 40), *engine.tokens["a"], 5, 6])
    engine.run()
    assert engine.stats["b"].num_external_cached_tokens == 32


def test_a_lookup_that_is_not_answered_keeps_others_running(tier_engine, store):
    engine = tier_engine()
    store.answers_at_once = False
    engine.add("a", prompt_of(1, 100))
    engine.add("short", prompt_of(2, 10))
    for _ in range(5):
        engine.step()
    assert engine.finished == {"short": "length"}
    assert len(engine.watched) == 1, "somebody must wake the engine"
    engine.run()
    engine.assert_is_right()


def test_an_answer_is_used_however_long_the_step_takes_in_which_it_comes(tier_engine, store):
    engine = tier_engine(num_blocks=60)
    store.answers_at_once = False
    engine.add("busy", prompt_of(1, 50), max_tokens=60)
    engine.step()
    store.answer()
    engine.step()
    engine.add("b", prompt_of(2, 60))
    for _ in range(10):
        engine.step()
        engine.clock.advance(1.2)
        store.answer()
        engine.move()
    assert "busy" not in engine.finished, "else the steps are short again"
    assert engine.finished["b"] == "length"
    assert store.num_lookups <= 6, "one for each request, and those of saves"


def test_an_answer_that_was_used_long_ago_is_asked_for_again(tier_engine, store):
    engine = tier_engine()
    engine.add("a", prompt_of(1, 100))
    request = engine.core.scheduler.requests["a"]
    for seconds, num_lookups in ((0, 1), (0.9, 1), (0.2, 2)):
        engine.clock.advance(seconds)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert store.num_lookups == num_lookups
    engine.core.abort_requests(["a"])


def test_equal_questions_are_asked_once(tier_engine, store):
    engine = tier_engine()
    store.answers_at_once = False
    for name in "abc":
        engine.add(name, prompt_of(1, 100))
    engine.step()
    assert store.num_lookups == 1
    engine.run()
    engine.assert_is_right()


def test_a_question_is_never_larger_than_a_store_takes(tier_engine, store, monkeypatch):
    monkeypatch.setattr(scheduler_module, "MAX_KEYS", 7)
    engine = tier_engine(attentions=(HashAttention(window=20), HashAttention()), num_blocks=80)
    engine.add("a", prompt_of(1, 100))
    engine.run()
    engine.forget()
    engine.add("b", prompt_of(1, 100))
    engine.run()
    assert engine.stats["b"].num_external_cached_tokens == 48
    engine.assert_is_right()


def test_prompts_that_share_a_load_wait_for_it_and_then_hit(tier_engine, store):
    engine = tier_engine()
    engine.add("a", prompt_of(1, 100))
    engine.run()
    engine.forget()
    store.num_gets = 0
    store.answers_at_once = False
    engine.add("b", prompt_of(1, 100))
    engine.add("c", [*prompt_of(1, 96), 1, 2, 3])
    store.answers_at_once = True
    engine.run()
    assert store.num_gets == 1
    assert (engine.stats["b"].num_external_cached_tokens, engine.stats["c"].num_local_cached_tokens) == (96, 96)
    engine.assert_is_right()


def test_lost_store_is_a_miss(tier_engine, store):
    engine = tier_engine()
    engine.add("a", prompt_of(1, 100))
    engine.run()
    engine.forget()
    engine.add("b", prompt_of(1, 100))
    engine.step()
    store.is_lost = True  # between the answer and the load
    engine.run()
    assert engine.usage["b"].fallback_reason == "store_miss"
    assert engine.usage["b"].recomputed_tokens == 96
    engine.add("c", prompt_of(3, 100))
    engine.run()
    engine.assert_is_right()
    engine.assert_is_empty()


def test_aborted_load_ends_although_the_store_never_answers(tier_engine, store):
    engine = tier_engine()
    engine.add("a", prompt_of(1, 100))
    engine.run()
    engine.forget()
    engine.add("b", prompt_of(1, 100))
    engine.step()
    store.answers_at_once = False  # the question was answered, the get is not
    engine.move(1)
    assert store.open
    engine.core.abort_requests(["b"])
    for _ in range(3):
        engine.move()
        engine.step()
    engine.assert_is_empty()


@pytest.mark.parametrize("attentions", GROUPS.values(), ids=GROUPS)
def test_bytes_that_have_changed_are_recomputed_and_counted(tier_engine, store, rng, attentions):
    engine = tier_engine(attentions=attentions, num_blocks=80)
    engine.add("a", prompt_of(1, 100))
    engine.run()
    engine.forget()
    for content, _ in store.blocks.values():
        content[rng.randrange(len(content))] ^= 4
    engine.add("b", prompt_of(1, 100))
    engine.run()
    assert engine.usage["b"].fallback_reason == "digest"
    assert store.rejected == {"digest": engine.usage["b"].verified_blocks + sum(store.rejected.values())}
    engine.assert_is_right()
    engine.assert_is_empty()


def test_lazy_tier_gets_what_the_pool_is_about_to_lose(tier_engine, store):
    engine = tier_engine(is_lazy=True, num_blocks=30)
    engine.add("a", prompt_of(1, 100))
    engine.run()
    assert not store.blocks, "nothing is about to be reused"
    for number in range(2, 8):
        engine.add(f"x{number}", prompt_of(number, 100))
        engine.run()
    engine.add("b", prompt_of(1, 100))
    engine.run()
    stats = engine.stats["b"]
    assert stats.num_local_cached_tokens == 0
    assert stats.num_external_cached_tokens == 96
    engine.assert_is_right()
    engine.assert_is_empty()


def test_a_full_store_is_offered_blocks_and_refuses(tier_engine, scripted_store):
    engine = tier_engine(store=scripted_store(capacity=3))
    engine.add("a", prompt_of(1, 100))
    engine.run()
    assert engine.mover.counts["saved_blocks"] == 3
    assert engine.mover.counts["refused_blocks"] == 3
    engine.assert_is_empty()


def test_preemption_does_not_wait_for_copies_that_are_about_to_end(tier_engine, store):
    """While a copy is the only holder of blocks, a running request waits for them instead of preempting another."""
    engine = tier_engine(num_blocks=14)
    store.answers_at_once = False
    engine.add("a", prompt_of(1, 60), max_tokens=1)
    while not engine.finished:
        store.answer() if not engine.core.scheduler.running else None
        engine.step()
    assert engine.scheduler.num_saving_blocks
    assert engine.scheduler.has_pending_block_frees()
    engine.add("b", prompt_of(2, 150), max_tokens=60)
    engine.run()
    assert engine.core.stats.num_preemptions == 0
    engine.assert_is_right()
    engine.assert_is_empty()


def test_running_requests_do_not_stall_because_of_a_slow_tier(tier_engine, store):
    """Two running requests, in a pool with blocks pinned for copies: one is preempted, and the other continues meanwhile."""
    engine = tier_engine(num_blocks=24)
    store.answers_at_once = False
    engine.add("a", prompt_of(1, 96), max_tokens=1)
    while not engine.finished:
        store.answer() if not engine.core.scheduler.running else None
        engine.step()
    num_kept = engine.scheduler.num_saving_blocks
    assert num_kept
    for number in (2, 3):
        engine.add(f"r{number}", prompt_of(number, 128), max_tokens=60)
    for _ in range(90):
        for ticket in [ticket for ticket in store.open if isinstance(ticket, LookupTicket) and ticket in engine.watched]:
            store.open.remove(ticket)
            store._answer(ticket)
        engine.move()
        engine.step()
        engine.clock.advance(0.01)
    assert engine.scheduler.num_saving_blocks >= num_kept, "no copy has ended"
    assert engine.core.stats.num_preemptions == 1
    assert engine.finished.get("r2") == "length"
    engine.run()
    engine.assert_is_right()
    engine.assert_is_empty()


def random_turn(engine, rng, live, number):
    choice = rng.random()
    if choice < 0.25 and len(live) < 8:
        family, length = rng.randrange(3), rng.randrange(1, 170)
        name = f"r{number}"
        own = [7000 + number] * rng.randrange(3)
        engine.add(name, [*prompt_of(family, length), *own], max_tokens=rng.randrange(1, 30))
        live.append(name)
    elif choice < 0.35 and live:
        name = live.pop(rng.randrange(len(live)))
        engine.core.abort_requests([name])
    elif choice < 0.40:
        engine.store.corrupt(rng)
    elif choice < 0.45:
        engine.store.is_lost = rng.random() < 0.3
    elif choice < 0.5 and engine.store.blocks:
        engine.store.blocks.pop(rng.choice(sorted(engine.store.blocks)))
    elif choice < 0.7:
        engine.store.answer(rng.randrange(4))
        engine.move(rng.randrange(6))
    else:
        engine.step()


@pytest.mark.parametrize("is_lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("attentions", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_no_history_gives_a_wrong_token_or_loses_a_block(tier_engine, scripted_store, attentions, is_lazy, seed):
    """Requests with common prefixes in a pool that is too small, a tier that is slow, forgets, lies or is gone, and aborts."""
    rng = random.Random(f"{seed} {is_lazy} {len(attentions)}")
    store = scripted_store(capacity=rng.choice([6, 40, 1000]), answers_at_once=seed % 4 == 0)
    engine = tier_engine(store=store, is_lazy=is_lazy, attentions=attentions, num_blocks=rng.choice([40, 60, 90]))
    live = []
    for number in range(500):
        random_turn(engine, rng, live, number)
        live = [name for name in live if name not in engine.finished]
        engine.clock.advance(rng.random() / 10)
    store.is_lost = False
    engine.run()
    engine.assert_is_right()
    engine.assert_is_empty()
    assert not engine.core.scheduler.requests
    assert engine.finished.keys() >= set(live)
    assert "error" not in engine.finished.values()
