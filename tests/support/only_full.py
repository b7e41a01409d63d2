"""Marks cases of a test that run with ``--full`` only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def rest_in_full(cases: Sequence[Any], always: Iterable[Any] | None = None) -> list[Any]:
    """Return the cases, of which every run has those of ``always``, by default the first."""
    kept = cases[:1] if always is None else list(always)
    return [case if case in kept else pytest.param(case, marks=pytest.mark.full) for case in cases]
