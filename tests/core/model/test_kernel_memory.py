"""The memory of a worker does not grow with every number of rows that a step can have."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from kvferry.roles import limit_kernel_caches
limit_kernel_caches(int(sys.argv[1]))
import psutil, torch
from core.model.linear import make_linear
torch.set_num_threads(1)
layers = [make_linear(torch.randn(rows, columns)) for rows, columns in ((192, 64), (64, 64), (256, 64), (64, 256))]
process, used = psutil.Process(), []
with torch.inference_mode():
    for num_rows in range(1, 601):
        for layer, columns in zip(layers, (64, 64, 64, 256)):
            layer(torch.ones(num_rows, columns))
        if num_rows % 200 == 0:
            used.append(process.memory_info().rss >> 20)
print(json.dumps(used))
"""


def used_after(num_entries):
    """Return the resident memory in MiB after 200, 400 and 600 shapes."""
    command = [sys.executable, "-c", SCRIPT, str(num_entries)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_memory_is_flat_over_many_shapes():
    used = used_after(64)
    assert used[-1] - used[0] < 60, used


@pytest.mark.full
def test_memory_grows_with_every_shape_without_the_limit():
    """The reason for the limit; where this fails, oneDNN has changed and the setting may go."""
    used = used_after(1024)
    assert used[-1] - used_after(64)[-1] > 200, used
