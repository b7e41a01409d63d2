"""What the doctor's checks find."""

from __future__ import annotations

from core.config import load_config

OF_ANY_PROCESS = "worker.router_addresses=tcp://router:5570"  # not for serve, and of no worker that is known by its name


def verdicts(check, *settings):
    """Return the findings of a check by their subject."""
    return {finding.subject: finding for finding in check(load_config(assignments=settings))}
