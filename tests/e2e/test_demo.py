"""A newcomer's first command works."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_demo_shows_a_handoff_that_left_nothing():
    settings = ["--set", "worker.pin_cpus=false", "--set", "worker.cpu_threads=1", "--set", "local.ready_timeout_s=240"]
    command = [sys.executable, "-P", "-m", "kvferry", "demo", "--transport", "tcp", "--max-tokens", "8", *settings]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for pattern in (
        r"router, prefill-0, decode-0 are ready at http://127\.0\.0\.1:\d+",
        r"transport: tcp",
        r"tokens: (\d+) of \1 prompt tokens",
        r"bytes: [\d,]{7,}",
        r"verification: \d+\.\d ms",
        r"no block is leaked, leased, loading, parked or quarantined on any worker",
    ):
        assert re.search(pattern, result.stdout), pattern
    assert "\x1b[" not in result.stdout
