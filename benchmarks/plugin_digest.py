"""Digests in the wheel ``kvferry-vllm``: the compiled library against numpy, which computes them where there was no compiler.

    python benchmarks/plugin_digest.py [--repeats 15] [--json FILE] [--markdown]

Builds the wheel with a compiler and without one, and measures both in processes of their own that import nothing else of this
repository. Each digest of all blocks is followed by a plain copy of the same bytes; one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from common import Machine, Outcome, Spread, Table, make_parser, publish

BUILDER = Path(__file__).parents[1] / "packages/kvferry_vllm/build.py"
BUILDS: dict[str, dict[str, str]] = {"CompiledSums": {}, "NumpySums": {"CC": "no-such-compiler"}}
BLOCK_BYTES = (64 << 10, 2 << 20)  # of a tiny model, and 16 tokens of a model of 8 billion parameters in bf16
TOTAL_BYTES = 64 << 20
QUICK_BYTES = 2 << 20

Seconds = dict[str, list[float]]  # of "digest" and "copy"


def benchmark(repeats: int, total_bytes: int) -> Outcome:
    """Measure both builds with blocks of both sizes."""
    found = {name: measure_wheel(name, variables, repeats, total_bytes) for name, variables in BUILDS.items()}
    rows = []
    for block_bytes in BLOCK_BYTES:
        compiled, slow = (found[name][str(block_bytes)] for name in BUILDS)
        rows.append(
            [
                f"{block_bytes:,} bytes",
                *(f"{total_bytes / Spread.of(seconds).median / 1e9:.1f}" for seconds in (compiled["copy"], compiled["digest"])),
                Spread.of_ratios(compiled["digest"], compiled["copy"]).show(2),
                f"{total_bytes / Spread.of(slow['digest']).median / 1e9:.1f}",
                Spread.of_ratios(slow["digest"], slow["copy"]).show(2),
            ]
        )
    columns = ["blocks of", "copy, GB/s", "compiled, GB/s", "time / copy", "numpy, GB/s", "time / copy"]
    return Outcome([Table(columns, rows)], figures={"total_bytes": total_bytes, "seconds": found})


def measure_wheel(name: str, variables: dict[str, str], repeats: int, total_bytes: int) -> dict[str, Seconds]:
    """Build a wheel and measure it; the result is by size of blocks."""
    with TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(BUILDER), folder], env=os.environ | variables, check=True, stdout=subprocess.DEVNULL
        )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        command = [sys.executable, __file__, "--of", name, "--repeats", str(repeats), "--bytes", str(total_bytes)]
        run = subprocess.run(command, env=os.environ | {"PYTHONPATH": folder}, check=True, stdout=subprocess.PIPE)
    found: dict[str, Seconds] = json.loads(run.stdout)
    return found


def measure(expected: str, repeats: int, total_bytes: int) -> dict[int, Seconds]:
    """Measure the wheel that this process finds.

    Raises:
        RuntimeError: it computes digests in another way than ``expected``.
    """
    import numpy as np
    from kvferry_vllm._kvferry.core.digest import BlockDigester
    from kvferry_vllm._kvferry.core.multilinear import fastest_sums

    if fastest_sums().__name__ != expected:
        raise RuntimeError(f"this wheel has {fastest_sums().__name__}, not {expected}: a C compiler is needed")
    pool = np.random.default_rng(1).integers(0, 256, total_bytes, np.uint8)
    target = np.empty_like(pool)
    found = {}
    for block_bytes in BLOCK_BYTES:
        digester, blocks = BlockDigester(block_bytes), pool.reshape(-1, block_bytes)
        seconds: Seconds = {"digest": [], "copy": []}
        for _ in range(repeats + 1):
            seconds["digest"].append(timed(lambda blocks=blocks, digester=digester: [digester.digest(each) for each in blocks]))
            seconds["copy"].append(timed(lambda: np.copyto(target, pool)))
        found[block_bytes] = {name: values[1:] for name, values in seconds.items()}  # the first touches the memory
    return found


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that the work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = make_parser(__doc__, 15, takes_model=False)
    parser.add_argument("--of", choices=BUILDS, help="measure the wheel that is importable here (the script's own children)")
    parser.add_argument("--bytes", type=int, default=TOTAL_BYTES, help="bytes that are digested (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.of:
        print(json.dumps(measure(arguments.of, arguments.repeats, arguments.bytes)))
        return
    repeats, total_bytes = (1, QUICK_BYTES) if arguments.quick else (arguments.repeats, arguments.bytes)
    machine = Machine.now()
    publish(benchmark(repeats, total_bytes), machine, arguments)


if __name__ == "__main__":
    main()
