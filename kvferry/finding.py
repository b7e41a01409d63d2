"""One finding of ``kvferry doctor``: what was looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failure"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. ``fix`` says what to do if it is not in order."""

    subject: str
    verdict: Verdict
    text: str
    fix: str = ""
