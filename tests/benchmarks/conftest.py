"""The benchmark scripts: as modules for their pure parts, and as processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.benchmark_goals import read_figures

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """Return a benchmark's module, under a unique name."""
    sys.path.append(str(BENCHMARKS))  # where scripts find what they share

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"kvferry_benchmark_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def run_benchmark(no_child_left) -> Callable[..., str]:
    """Run a script to its end and return what it printed; what it writes with ``--json`` lists its aims."""

    def run(name: str, *arguments: str) -> str:
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        if "--json" in arguments:
            read_figures(Path(arguments[arguments.index("--json") + 1]))
        return result.stdout

    return run
