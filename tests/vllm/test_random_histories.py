"""Random requests, late and wrong reads, aborts and preemptions on a pair of engines: right tokens, and nothing held."""

import random
import time

import pytest

from tests.support.vllm_engine import REMOTE_DECODE
from tests.vllm.conftest import settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LEASE_S = 0.5
NUM_SEEDS, NUM_SEEDS_IN_FULL = 10, 200
NUM_EVENTS = 14


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.full), True], ids=["steps in turn", "async scheduling"]
)
def history_pair(request, new_pair):
    return new_pair(
        extra=settings("tcp", lease_s=LEASE_S, lease_renew_interval_s=0.2),
        max_num_batched_tokens=128,
        enable_chunked_prefill=True,
        async_scheduling=request.param,
    )


class History:
    """One random history. ``handoffs`` are prompts with their published parameters, read or not."""

    def __init__(self, pair, seed):
        self._pair = pair
        self._random = random.Random(seed)
        self._handoffs = []
        self._prefixes = [pair.prompt(64 * self._random.randint(1, 3)) for _ in range(2)]
        self._open = []  # requests on D, with their prompts
        self.num_answers = 0

    def run(self):
        events = [self.hand_off, self.hand_off, self.read, self.read, self.read_another, self.abort_on_p]
        events += [self.abort_on_d, self.preempt, self.reuse_blocks, self.let_leases_end, self.begin_to_read]
        for _ in range(NUM_EVENTS):
            self._random.choice(events)()
        for name, prompt in self._open:
            self.check(self._pair.d.ask("result", name=name), prompt)

    def prompt(self):
        prefix = self._random.choice([[], *self._prefixes])
        return prefix + self._pair.prompt(self._random.randint(1, 200))

    def hand_off(self):
        prompt = self.prompt()
        self._handoffs.append((prompt, self._pair.hand_off(prompt)))

    def chosen(self):
        if not self._handoffs:
            self.hand_off()
        return self._random.choice(self._handoffs)

    def read(self):
        prompt, params = self.chosen()
        self.check(self._pair.d.generate(self._pair.name(), prompt, 8, params=params), prompt)

    def read_another(self):
        """A router's mistake: the parameters of another prompt."""
        (_, params), prompt = self.chosen(), self.prompt()
        self.check(self._pair.d.generate(self._pair.name(), prompt, 8, params=params), prompt)

    def begin_to_read(self):
        (prompt, params), name = self.chosen(), self._pair.name()
        self._pair.d.ask("add", name=name, prompt=prompt, max_tokens=8, params=params)
        self._open.append((name, prompt))

    def abort_on_d(self):
        (prompt, params), name = self.chosen(), self._pair.name()
        count = self._random.randint(0, 4)
        self._pair.d.ask("add_and_step", name=name, prompt=prompt, max_tokens=8, params=params, count=count)
        self._pair.d.ask("abort", name=name)

    def abort_on_p(self):
        name, count = self._pair.name(), self._random.randint(0, 4)
        self._pair.p.ask("add_and_step", name=name, prompt=self.prompt(), max_tokens=1, params=REMOTE_DECODE, count=count)
        self._pair.p.ask("abort", name=name)

    def preempt(self):
        name, prompt, count = self._pair.name(), self.prompt(), self._random.randint(1, 3)
        request = {"name": name, "prompt": prompt, "max_tokens": 1, "params": REMOTE_DECODE}
        self._pair.p.ask("add_step_and_preempt", count=count, **request)
        params = self._pair.p.ask("result", name=name)["params"]
        if params is not None:
            self._handoffs.append((prompt, params))

    def reuse_blocks(self):
        self._pair.reuse_blocks()
        self._pair.d.ask("reset_prefix_cache")

    def let_leases_end(self):
        time.sleep(LEASE_S + 0.1)

    def check(self, result, prompt):
        self.num_answers += 1
        assert (
            result["tokens"] == self._pair.d.generate(self._pair.name(), prompt, 8, cache_salt=f"{self.num_answers}")["tokens"]
        )


def run_seeds(pair, seeds):
    for seed in seeds:
        history = History(pair, seed)
        history.run()
        pair.assert_nothing_is_held()


def test_random_histories_end_well(history_pair):
    run_seeds(history_pair, range(NUM_SEEDS))
    counts = history_pair.counts()
    assert counts["loads"] > NUM_SEEDS
    assert counts["failures"]["stale"] > NUM_SEEDS / 2  # late and repeated reads were among them


@pytest.mark.full
@pytest.mark.timeout(900)
def test_many_random_histories_end_well(history_pair):
    run_seeds(history_pair, range(1000, 1000 + NUM_SEEDS_IN_FULL))
