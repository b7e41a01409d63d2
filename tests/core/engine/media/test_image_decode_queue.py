"""Which images are prepared in which order, and what stays, by the rule at the head of the module."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from core.engine.media.image_decode_queue import ImageDecodeQueue
from core.errors import InvalidRequest
from core.wire.media import MMFeature

UNIT = 4  # bytes of one element


def feature(name: str, size: int = 1) -> MMFeature:
    return MMFeature(identifier=name.encode().ljust(16, b"."), offset=0, length=size, num_embeds=size, media_index=0)


class Bench:
    """Images named by letters; sizes in units, as the budget."""

    def __init__(self, budget: int) -> None:
        self.images = ImageDecodeQueue(lambda num_embeds: num_embeds * UNIT, budget * UNIT)
        self.features: dict[str, MMFeature] = {}

    def ask(self, names: str, sizes: dict[str, int] | None = None, user: str = "r") -> str:
        """Ask for images in this order in a step of its own; return those that are ready."""
        self.images.begin_step()
        ready = [name for name in names if self.is_ready(name, (sizes or {}).get(name, 1), user)]
        self.images.end_step()
        return "".join(ready)

    def is_ready(self, name: str, size: int = 1, user: str = "r") -> bool:
        known = self.features.setdefault(name, feature(name, size))
        return self.images.is_ready(user, known, name.encode())

    def prepare(self) -> str:
        """Prepare one image; return its name."""
        image = self.images.begin_next()
        if image is None:
            return ""
        self.images.end(image, np.zeros(image.num_bytes // UNIT, dtype=np.float32))
        return image.content.decode()

    def prepare_all(self) -> str:
        return "".join(iter(self.prepare, ""))

    def take(self, name: str) -> bool:
        return self.images.take(self.features[name].identifier) is not None

    def forget(self, user: str, names: str) -> None:
        self.images.forget(user, [self.features[name] for name in names])


@pytest.fixture
def bench() -> Bench:
    return Bench(budget=3)


def test_images_are_prepared_in_the_order_of_the_questions(bench):
    assert bench.ask("bac") == ""
    assert bench.prepare_all() == "bac"
    assert bench.ask("abc") == "abc"


def test_nothing_is_prepared_beyond_the_budget(bench):
    bench.ask("abcde")
    assert bench.prepare_all() == "abc"
    assert bench.images.num_bytes == 3 * UNIT


def test_a_small_image_does_not_overtake_one_that_waits_for_room(bench):
    sizes = {"a": 2, "b": 2, "c": 1}
    bench.ask("abc", sizes)
    assert bench.prepare_all() == "a"
    bench.take("a")
    bench.ask("bc", sizes)
    assert bench.prepare_all() == "bc"


def test_an_image_larger_than_the_budget_is_prepared_when_it_is_first(bench):
    bench.ask("ab", {"a": 9})
    assert bench.prepare_all() == "a"
    assert bench.ask("ab") == "a"
    assert bench.prepare_all() == ""
    bench.take("a")
    bench.ask("b")
    assert bench.prepare_all() == "b"


def test_an_image_that_two_requests_show_is_prepared_once(bench):
    bench.images.begin_step()
    bench.is_ready("a", user="r")
    bench.is_ready("a", user="s")
    bench.images.end_step()
    assert bench.prepare_all() == "a"


def test_what_is_taken_is_forgotten_and_prepared_anew_if_it_is_asked_for_again(bench):
    bench.ask("a")
    bench.prepare()
    assert bench.take("a")
    assert not bench.take("a")
    assert (bench.images.num_bytes, bench.images.num_images) == (0, 0)
    bench.ask("a")
    assert bench.prepare_all() == "a"


def test_the_image_that_is_waited_for_first_gets_its_room_from_those_behind_it(bench):
    """The head-of-line guarantee: a full budget of images behind it, ready and not taken, does not block it."""
    bench.ask("bcd")
    bench.prepare_all()
    assert bench.ask("abcd") == "bcd"  # d has lost its room
    assert bench.prepare_all() == "a"
    assert bench.ask("abcd") == "abc"


def test_the_end_of_a_step_tells_whether_a_ready_image_has_made_room(bench):
    bench.ask("bcd")
    bench.images.begin_step()
    assert not bench.images.end_step(), "nothing is ready"
    bench.ask("bcd")
    bench.prepare_all()
    for name, has_dropped in (("d", False), ("a", True), ("a", False)):
        bench.images.begin_step()
        bench.is_ready(name)
        assert bench.images.end_step() is has_dropped


def test_images_that_nobody_asks_for_in_this_step_lose_their_room_first(bench):
    bench.ask("bc")
    bench.prepare_all()
    bench.ask("axc", {"a": 2, "x": 5})  # there is room for one beside a, and x is not kept
    assert bench.prepare_all() == "a"
    assert bench.ask("bc") == "c"


def test_images_that_nobody_asks_for_in_this_step_stay_while_there_is_room(bench):
    bench.ask("abc")
    bench.prepare_all()
    bench.ask("")
    assert bench.ask("abc") == "abc"


def test_what_was_queued_and_is_behind_others_now_waits(bench):
    bench.ask("bcd")
    assert bench.prepare() == "b"
    bench.ask("aebcd")
    assert bench.prepare_all() == "ae"
    assert bench.ask("aeb") == "aeb"


def test_an_image_in_progress_that_has_lost_its_room_is_not_kept(bench):
    bench.ask("d")
    begun = bench.images.begin_next()
    bench.ask("abcd")
    bench.images.end(begun, np.zeros(1, dtype=np.float32))
    assert bench.images.num_bytes == 0
    assert bench.prepare_all() == "abc"


def test_an_image_in_progress_that_has_its_room_again_is_kept(bench):
    bench.ask("d")
    begun = bench.images.begin_next()
    bench.ask("abcd")
    bench.ask("d")
    bench.images.end(begun, np.zeros(1, dtype=np.float32))
    assert bench.ask("d") == "d"


def test_a_claimed_image_keeps_its_room_until_it_is_taken(bench):
    bench.ask("b", {"b": 2})
    bench.prepare()
    bench.images.begin_step()
    bench.is_ready("a", 3)
    bench.is_ready("b")
    bench.images.claim(bench.features["b"].identifier)
    bench.images.end_step()
    assert bench.prepare_all() == ""  # there is room for a in the next step only
    assert bench.take("b")
    bench.ask("a")
    assert bench.prepare_all() == "a"


def test_nothing_is_prepared_for_a_request_that_has_left(bench):
    bench.ask("ab")
    bench.forget("r", "ab")
    assert bench.prepare_all() == ""
    assert bench.images.num_images == 0


def test_an_image_that_somebody_else_wants_stays(bench):
    bench.ask("a", user="r")
    bench.ask("a", user="s")
    bench.forget("r", "a")
    bench.forget("r", "a")
    assert bench.prepare_all() == "a"
    bench.forget("s", "a")
    assert bench.images.num_bytes == 0


def test_nothing_is_kept_of_an_image_whose_requests_have_left_while_it_was_worked_on(bench):
    bench.ask("a")
    begun = bench.images.begin_next()
    bench.forget("r", "a")
    bench.images.end(begun, np.zeros(1, dtype=np.float32))
    assert (bench.images.num_bytes, bench.images.num_images) == (0, 0)


def test_a_bad_image_is_ready_and_takes_no_room(bench):
    bench.ask("a", {"a": 3})
    bench.images.end(bench.images.begin_next(), InvalidRequest("it is damaged"))
    assert bench.ask("ab") == "a"
    assert bench.images.num_bytes == 0
    assert bench.prepare_all() == "b"
    assert isinstance(bench.images.take(bench.features["a"].identifier), InvalidRequest)


class ImagesMachine(RuleBasedStateMachine):
    """Steps that ask for images in a fixed order of requests, which leave or are served at any time."""

    names = st.sampled_from("abcdefgh")

    @initialize(budget=st.integers(1, 6), sizes=st.lists(st.integers(1, 5), min_size=8, max_size=8))
    def build(self, budget, sizes):
        self.bench, self.budget = Bench(budget), budget
        self.sizes = dict(zip("abcdefgh", sizes, strict=True))
        self.waiting: list[str] = []
        self.in_progress = None
        self.ready = ""

    @rule(name=names)
    def come(self, name):
        if name not in self.waiting:
            self.waiting.append(name)

    @rule(name=names)
    def come_first(self, name):
        if name not in self.waiting:
            self.waiting.insert(0, name)

    @rule(name=names)
    def leave(self, name):
        if name in self.waiting and name in self.bench.features:
            self.waiting.remove(name)
            self.bench.forget("r", name)

    @rule(serves=st.booleans())
    def step(self, serves):
        self.bench.images.begin_step()
        self.ready = "".join(name for name in self.waiting if self.bench.is_ready(name, self.sizes[name]))
        served = self.ready[:1] if serves else ""
        if served:
            self.bench.images.claim(self.bench.features[served].identifier)
        self.bench.images.end_step()
        if served:
            assert self.bench.take(served), "claimed, and gone"
            self.waiting.remove(served)

    @precondition(lambda self: self.in_progress is None)
    @rule()
    def begin(self):
        self.in_progress = self.bench.images.begin_next()

    @precondition(lambda self: self.in_progress is not None)
    @rule()
    def end(self):
        self.bench.images.end(self.in_progress, np.zeros(self.in_progress.num_bytes // UNIT, dtype=np.float32))
        self.in_progress = None

    @invariant()
    def the_budget_holds(self):
        if hasattr(self, "bench"):
            largest = max(self.sizes[name] for name in self.sizes)
            assert self.bench.images.num_bytes <= max(self.budget, largest) * UNIT

    def teardown(self):
        """Whoever waits is served in the end, the first one first."""
        if not hasattr(self, "bench"):
            return
        if self.in_progress is not None:
            self.end()
        while self.waiting:
            head = self.waiting[0]
            self.step(serves=False)
            self.bench.prepare_all()
            self.step(serves=True)
            assert self.waiting[:1] != [head], "the first one was not served"
        assert self.bench.images.num_bytes == 0
        assert self.bench.images.num_images == 0


@pytest.mark.slow
def test_random_histories_keep_the_budget_and_serve_everybody():
    examples = settings.default.max_examples
    run_state_machine_as_test(ImagesMachine, settings=settings(max_examples=examples, stateful_step_count=25, deadline=None))
