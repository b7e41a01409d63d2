"""A connector that loads within a step, for simulated workers: both sides are those of ``core.testing.scripted_loads``.

It offers a part of some requests' tokens, and writes the KV that the model would compute. In a bad load one block is garbage,
and is reported. Requests with images are left out: their entries do not follow from their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from core.request import Request
from core.testing.hash_model import HashAttention
from core.testing.scripted_loads import Remote, Script, ScriptedLoad, ScriptedScheduler, ScriptedWorker
from kvferry.sim.host import Host
from kvferry.sim.troubles import Kind

_SHARE = 0.12  # of runs with such a connector


@dataclass(frozen=True, slots=True)
class StepLoadPlan:
    """How often it has a hit, and how often the hit is bad; ``is_first`` if it is asked before the p2p connector."""

    offer_rate: float
    bad_rate: float
    is_first: bool

    def __str__(self) -> str:
        order = "first" if self.is_first else "last"
        return f"loads within a step: {self.offer_rate:.2f} of requests, {self.bad_rate:.2f} of them bad, asked {order}"


def draw_step_loads(seed: int, *, is_wanted: bool | None) -> StepLoadPlan | None:
    """Return the connector of a seed; whether there is one is drawn if ``is_wanted`` is None."""
    random = Random(f"{seed}/step loads")
    if random.random() >= _SHARE if is_wanted is None else not is_wanted:
        return None
    return StepLoadPlan(random.uniform(0.3, 1.0), random.choice((0.0, 0.2, 0.6)), random.random() < 0.5)


class StepLoads:
    """The two sides of one worker's connector."""

    def __init__(
        self, host: Host, plan: StepLoadPlan, attentions: tuple[HashAttention, ...], block_size: int, seed: int
    ) -> None:
        script, random = Script(attentions=attentions), Random(f"{seed}/step loads")
        self.scheduler = _Offers(script, plan, block_size, random)
        self.worker = _Loads(script, host, random)

    def count_what_happened(self) -> dict[str, int]:
        """Count events that not every run has."""
        return {"step_loads": self.worker.num_loads, "bad_step_loads": self.worker.num_bad_loads}


class _Offers(ScriptedScheduler):
    """Draws its hit for a request when it first sees it."""

    def __init__(self, script: Script, plan: StepLoadPlan, block_size: int, random: Random) -> None:
        super().__init__(script)
        self._plan = plan
        self._block_size = block_size
        self._random = random

    def on_new_request(self, request: Request) -> None:
        """Draw whole blocks, or everything."""
        if request.mm_features or self._random.random() >= self._plan.offer_rate:
            return
        num_blocks = self._random.randint(0, request.num_tokens // self._block_size)
        num_tokens = self._random.choice((request.num_tokens, num_blocks * self._block_size))
        is_bad = self._random.random() < self._plan.bad_rate
        self.script.remote[request.request_id] = Remote(num_tokens, is_async=False, is_corrupt=is_bad)


class _Loads(ScriptedWorker):
    """Writes block by block. Each bad load is recorded as trouble of its worker and its request."""

    def __init__(self, script: Script, host: Host, random: Random) -> None:
        super().__init__(script)
        self._host = host
        self._random = random
        self.num_loads = self.num_bad_loads = 0

    def write(self, load: ScriptedLoad, is_corrupt: bool) -> None:
        """Write the entries of the load's tokens, garbage into one block if it is bad."""
        block_size = self.pool.layout.block_size
        blocks = range(load.start // block_size, -(-load.end // block_size))
        bad_block = self._random.choice(blocks) if is_corrupt else None
        for block in blocks:
            start, end = max(load.start, block * block_size), min(load.end, (block + 1) * block_size)
            super().write(replace(load, start=start, end=end), block == bad_block)
        self.num_loads += 1
        self.num_bad_loads += is_corrupt
        self._host.log("loads within the step", load)
        if is_corrupt:
            names = (self._host.process.name, _client_of(load.request_id))
            self._host.troubles.note(Kind.BAD_LOAD, names, 0.0)


def _client_of(request_id: str) -> str:
    """Return the name of a client's request, without the numbers of its attempt and its choice."""
    return request_id.partition("/")[0].partition(".")[0]
