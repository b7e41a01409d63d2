"""What every benchmark writes under ``goals`` with ``--json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_figures(path: Path) -> dict[str, Any]:
    """Return what a benchmark has written, whose list of aims has the form that all share."""
    figures: dict[str, Any] = json.loads(path.read_text())
    assert isinstance(figures["goals"], list)
    for goal in figures["goals"]:
        check_goal(goal)
    names = [goal["name"] for goal in figures["goals"]]
    assert len(set(names)) == len(names)
    return figures


def check_goal(goal: Mapping[str, object]) -> None:
    assert goal.keys() == {"name", "value", "goal", "unit", "met"}
    assert isinstance(goal["name"], str)
    assert isinstance(goal["unit"], str)
    assert goal["name"]
    assert goal["unit"]
    assert type(goal["goal"]) in (int, float)
    assert type(goal["value"]) in (int, float, type(None))
    assert type(goal["met"]) is bool
    assert goal["value"] is not None or not goal["met"]
