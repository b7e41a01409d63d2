"""What the variables that a worker sets for torch do: memory over many shapes, and large pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from kvferry.roles import configure_torch
configure_torch(int(sys.argv[1]))
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


LARGE = """
from pathlib import Path
from kvferry.roles import configure_torch
configure_torch(64)
import torch
large = torch.empty(8 << 20, dtype=torch.uint8)
print(sum(line.startswith("VmFlags") and " hg" in line for line in Path("/proc/self/smaps").read_text().splitlines()))
"""


@pytest.mark.parametrize(("chosen", "is_advised"), [({}, True), ({"THP_MEM_ALLOC_ENABLE": "0"}, False)])
def test_tensors_of_a_worker_ask_for_large_pages_unless_the_user_forbids_it(chosen, is_advised):
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no transparent huge pages")
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | chosen
    result = subprocess.run(
        [sys.executable, "-c", LARGE], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert (int(result.stdout) > 0) == is_advised
