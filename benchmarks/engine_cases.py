"""The cases of ``benchmarks/engine.py``: what each side took, the comparison, and how it is printed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import at_least

PREFILL_SHARE_OF_FLOOR = 0.95  # a prefill this near to the floor need not be faster than vLLM's


@dataclass
class Case:
    """Seconds of one case per repeat: the engine's, the baseline's, and what else was measured in the same run."""

    name: str
    unit: str
    amount: float  # tokens that the seconds were spent on
    goal: float  # the baseline's time / ours, at least
    vllm_goal: float  # its time / ours, at least
    ours: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    vllm: list[float] = field(default_factory=list)  # empty without it
    is_prefill: bool = False
    extra: dict[str, list[float]] = field(default_factory=dict)
    floor_s: float = 0.0
    floor_name: str = ""

    def add(self, side: str, seconds: float) -> None:
        """Note a measurement of a side."""
        {"ours": self.ours, "transformers": self.baseline, "vllm": self.vllm}[side].append(seconds)

    def clear(self) -> None:
        """Forget the sides' measurements."""
        for times in (self.ours, self.baseline, self.vllm):
            times.clear()

    def beside_vllm(self) -> dict[str, object]:
        """Return the comparison with vLLM; empty without it."""
        if not self.vllm:
            return {}
        ratios = [theirs / ours for ours, theirs in zip(self.ours, self.vllm, strict=True)]
        theirs_s = statistics.median(self.vllm)
        goal = self.vllm_goal
        if self.is_prefill:
            goal = min(goal, PREFILL_SHARE_OF_FLOOR * theirs_s / self.floor_s)
        speedup = statistics.median(ratios)
        return {
            "vllm_ms": theirs_s * 1e3,
            "vllm_rate": self.amount / theirs_s,
            "vllm_times_floor": theirs_s / self.floor_s if self.floor_s else None,
            "vllm_speedup": speedup,
            "vllm_speedup_min": min(ratios),
            "vllm_speedup_max": max(ratios),
            "vllm_goal": goal,
        }

    def summary(self) -> dict[str, object]:
        ratios = [theirs / ours for ours, theirs in zip(self.ours, self.baseline, strict=True)]
        ours_s = statistics.median(self.ours)
        return self.beside_vllm() | {
            "case": self.name,
            "ours_ms": ours_s * 1e3,
            "transformers_ms": statistics.median(self.baseline) * 1e3,
            **{f"{name}_ms": statistics.median(times) * 1e3 for name, times in self.extra.items()},
            "unit": self.unit,
            "ours_rate": self.amount / ours_s,
            "transformers_rate": self.amount / statistics.median(self.baseline),
            "speedup": statistics.median(ratios),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "goal": self.goal,
            "floor_ms": self.floor_s * 1e3,
            "floor_name": self.floor_name,
            "times_floor": ours_s / self.floor_s if self.floor_s else None,
        }


def goals_of(rows: Sequence[Mapping[str, Any]], num_threads: int) -> list[dict[str, object]]:
    """Return the aims of the cases: beside vLLM if it took part, else beside transformers, which are about one thread."""
    if all("vllm_ms" in row for row in rows):
        return [at_least(f"{row['case']}: vLLM / ours", row["vllm_speedup"], row["vllm_goal"], "ratio") for row in rows]
    if num_threads != 1:
        return []
    return [at_least(f"{row['case']}: transformers / ours", row["speedup"], row["goal"], "ratio") for row in rows]


def print_table(rows: list[dict[str, object]]) -> None:
    """Print the cases, each with the other sides and the floor."""
    print(f"{'case':24s} {'ours':>12s} {'transformers':>13s} {'speedup (min-max)':>20s} {'floor':>10s} {'ours/floor':>10s}")
    for row in rows:
        spread = f"{row['speedup']:.2f} ({row['speedup_min']:.2f}-{row['speedup_max']:.2f})"
        print(
            f"{row['case']:24s} {row['ours_ms']:9.1f} ms {row['transformers_ms']:10.1f} ms {spread:>20s} "
            f"{row['floor_ms']:7.1f} ms {row['times_floor']:10.2f}"
        )
        print(
            f"{'':24s} {row['ours_rate']:9.1f}    {row['transformers_rate']:10.1f}    {row['unit']}; floor: {row['floor_name']}"
        )
        if "vllm_ms" in row:
            spread = f"{row['vllm_speedup']:.2f} ({row['vllm_speedup_min']:.2f}-{row['vllm_speedup_max']:.2f})"
            print(
                f"{'':24s} vLLM {row['vllm_ms']:.1f} ms, {row['vllm_rate']:.1f} {row['unit']}, "
                f"{row['vllm_times_floor']:.2f} of the floor; ours {spread} x"
            )
        if "sequential_ms" in row:
            print(f"{'':24s} transformers one by one: {row['sequential_ms']:.1f} ms")
