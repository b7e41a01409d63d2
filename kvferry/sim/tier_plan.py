"""The tier below the workers' pools of a simulated run, its store of embeddings, and their faults.

Drawn from the seed separately from everything else, so that runs without them stay the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from kvferry.sim.faults import STORE_FAULTS, TIER_FAULTS, Fault, FaultEvent

STORE = "store-0"  # the process's name
EMBEDDING_STORE = "store-1"
_SHARE = 0.35  # of runs that have a tier
_GENTLE_SHARE = 0.3  # of these, runs without faults of the tier
_OFFLOAD_SHARE = 0.35
_ONLY_OF_A_STORE = frozenset({Fault.STORE_CRASH, Fault.STORE_FREEZE, Fault.STORE_LOSS})
_MANY_SLOTS = 400
_FAILING_SHARE = 0.5  # of the runs with lower tiers, in which these fail
_SLOTS_ABOVE_FAILING_TIERS = (6, 24)  # few, so that blocks are loaded from below
_FEW_IMAGES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """One tier. ``name`` is its connector: each worker has a tier of its own (``offload``), or all share one (``store``).

    A store of embeddings alone has such a plan, too.
    """

    seed: int
    name: Literal["offload", "store"]
    kinds: frozenset[Fault]  # of the store and of its lower tiers
    workers: tuple[str, ...]  # engine ids
    num_slots: int  # of the arena
    eviction: str
    is_lazy: bool = False
    write_back: bool = False
    num_lower_tiers: int = 0  # the first behaves like a disk, the second must be asked
    remote_workers: frozenset[str] = frozenset()  # workers that do not map the arena
    loss_rate: float = 0.0  # share of the store's replies that are lost
    question_loss_rate: float = 0.0  # share of the messages to the store that are lost
    late_rate: float = 0.0  # share of replies that are late, and delay all that follow
    late_s: float = 0.0  # up to
    process: str = STORE  # of a store that all workers share

    def __str__(self) -> str:
        details = {
            f"{self.num_slots} slots": True,
            self.eviction: True,
            "lazy": self.is_lazy,
            "write-back": self.write_back,
            f"{self.num_lower_tiers} lower tiers": self.num_lower_tiers,
            f"frames for {', '.join(sorted(self.remote_workers))}": self.remote_workers,
            f"{self.loss_rate:.2f} of replies lost": self.loss_rate,
            f"{self.late_rate:.2f} up to {self.late_s:.2f} s late": self.late_rate,
        }
        what = f"tier {self.name}" if self.process == STORE else "store of embeddings"
        return f"{what}: {', '.join(text for text, is_told in details.items() if is_told)}"

    def draw_events(self, moments: Sequence[float]) -> list[FaultEvent]:
        """Draw its faults at fixed times, shortly after something has begun."""
        random = Random(f"{self.seed}/tier events")
        owners = (self.process,) if self.name == "store" else self.workers
        events = []
        for kind, most, longest_s in (
            (Fault.STORE_CRASH, 3, 3.0),
            (Fault.STORE_FREEZE, 3, 8.0),
            (Fault.STORE_CORRUPT, 60, 0.0),
        ):
            for _ in range(random.randint(most // 2, most) if kind in self.kinds else 0):
                at = random.choice(moments) + random.choice((0.1, 0.5, 2.0)) * random.random()
                seconds = random.uniform(0.1, longest_s) if longest_s else 0.0
                events.append(FaultEvent(at, kind, (random.choice(owners),), seconds))
        return events + self._draw_failures(moments)

    def _draw_failures(self, moments: Sequence[float]) -> list[FaultEvent]:
        """Draw when lower tiers fail; each event names the tier by its position."""
        random = Random(f"{self.seed}/tier failures/{self.process}")
        events = []
        for kind, most, longest_s in (
            (Fault.TIER_FULL, 3, 5.0),
            (Fault.TIER_UNREADABLE, 4, 3.0),
            (Fault.TIER_LOSS, 6, 0.0),
        ):
            for _ in range(random.randint(1, most) if kind in self.kinds else 0):
                at = random.choice(moments) + random.choice((0.1, 0.5, 2.0)) * random.random()
                seconds = random.uniform(0.2, longest_s) if longest_s else 0.0
                tier = f"tier-{random.randrange(self.num_lower_tiers)}"
                events.append(FaultEvent(at, kind, (self.process, tier), seconds))
        return events


def draw_tier(seed: int, chosen: Collection[Fault] | None, workers: Sequence[str]) -> TierPlan | None:
    """Return the tier of a seed, if it has one; it has if faults of a tier are ``chosen``."""
    random = Random(f"{seed}/tier")
    has_tier = random.random() < _SHARE
    kinds = _draw_kinds(random) if chosen is None else frozenset(chosen) & frozenset(STORE_FAULTS)
    has_failing_tiers = chosen is not None and not frozenset(TIER_FAULTS).isdisjoint(chosen)
    if not has_tier and (chosen is None or not (kinds or has_failing_tiers)):
        return None
    is_offload = random.random() < _OFFLOAD_SHARE and not kinds & _ONLY_OF_A_STORE and not has_failing_tiers
    return _let_tiers_fail(_draw_plan(random, seed, kinds, workers, is_offload=is_offload), chosen)


def draw_embedding_store(seed: int, chosen: Collection[Fault] | None, workers: Sequence[str]) -> TierPlan:
    """Return the store of embeddings alone of a seed that has one. A full one holds fewer than there are images."""
    random = Random(f"{seed}/embedding store")
    kinds = _draw_kinds(random) if chosen is None else frozenset(chosen) & frozenset(STORE_FAULTS)
    plan = _draw_plan(random, seed, kinds, workers, is_offload=False)
    num_slots = random.randint(1, _FEW_IMAGES) if Fault.STORE_FULL in kinds else plan.num_slots
    return _let_tiers_fail(replace(plan, process=EMBEDDING_STORE, num_slots=num_slots), chosen)


def _let_tiers_fail(plan: TierPlan, chosen: Collection[Fault] | None) -> TierPlan:
    """Return a plan whose lower tiers fail in some way, if that is drawn or ``chosen``."""
    random = Random(f"{plan.seed}/failing tiers/{plan.process}")
    if chosen is not None:
        kinds = frozenset(chosen) & frozenset(TIER_FAULTS)
    elif plan.num_lower_tiers and random.random() < _FAILING_SHARE:
        kinds = frozenset(random.sample(TIER_FAULTS, random.randint(1, len(TIER_FAULTS))))
    else:
        kinds = frozenset()
    if not kinds:
        return plan
    num_slots = min(plan.num_slots, random.randint(*_SLOTS_ABOVE_FAILING_TIERS))
    return replace(plan, kinds=plan.kinds | kinds, num_slots=num_slots, num_lower_tiers=max(1, plan.num_lower_tiers))


def _draw_plan(random: Random, seed: int, kinds: frozenset[Fault], workers: Sequence[str], *, is_offload: bool) -> TierPlan:
    has_loss = Fault.STORE_LOSS in kinds
    num_lower_tiers = random.choice((0, 1, 1, 2))
    return TierPlan(
        seed=seed,
        name="offload" if is_offload else "store",
        kinds=kinds,
        workers=tuple(workers),
        num_slots=random.randint(1, 8) if Fault.STORE_FULL in kinds else _MANY_SLOTS,
        eviction=random.choice(("arc", "s3fifo", "lru")),
        is_lazy=is_offload and random.random() < 0.5,
        write_back=not is_offload and num_lower_tiers > 0 and random.random() < 0.3,
        num_lower_tiers=0 if is_offload else num_lower_tiers,
        remote_workers=frozenset() if is_offload else frozenset(name for name in workers if random.random() < 0.3),
        loss_rate=random.uniform(0.02, 0.3) if has_loss else 0.0,
        late_rate=random.uniform(0.02, 0.2) if has_loss else 0.0,
        late_s=random.uniform(0.3, 3.0) if has_loss else 0.0,
    )


def _draw_kinds(random: Random) -> frozenset[Fault]:
    if random.random() < _GENTLE_SHARE:
        return frozenset()
    return frozenset(random.sample(STORE_FAULTS, random.randint(1, len(STORE_FAULTS))))
