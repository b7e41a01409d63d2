"""docs/gpu.md lists every test that needs a GPU, none that does not exist, and what ran with each version that is admitted."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"^@pytest\.mark\.gpu\n(?:@.*\n|[ )].*\n)*(?:async def|def|class) (\w+)", re.MULTILINE)


def test_every_test_that_needs_a_gpu_is_listed_with_its_last_run():
    found = {
        f"{path.relative_to(ROOT)}::{name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in MARKED.findall(path.read_text())
    }
    rows = re.findall(r"^\| `(tests/\S+::\w+)` \| ([^|]+) \|", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    assert len(found) > 5, "the pattern finds nothing"
    assert {name for name, _ in rows} == found
    assert all(re.fullmatch(r"not run yet|(passed|failed|skipped).* \d{4}-\d{2}-\d{2}.*", run.strip()) for _, run in rows)


def test_the_command_names_the_folders_of_all_of_them():
    """Whole ``tests`` is not collected where only what docs/gpu.md lists is installed."""
    content = (ROOT / "docs/gpu.md").read_text()
    (command,) = re.findall(r"^python -m pytest -m gpu .*$", content, re.MULTILINE)
    folders = re.findall(r"tests/\w+", command)
    listed = re.findall(r"^\| `(tests/\S+)::", content, re.MULTILINE)
    assert listed
    assert [name for name in listed if not name.startswith(tuple(f"{folder}/" for folder in folders))] == []


def test_every_version_that_is_admitted_has_a_row_of_what_ran_with_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [name.removeprefix("Programming Language :: Python :: ") for name in project["classifiers"]]
    (torch,) = (name for name in project["dependencies"] if name.startswith("torch"))
    first, end = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups())
    rows = re.findall(r"^\| (3\.\d+) \| (2\.\d+)\.\d+ \| \S+", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == set(itertools.product(pythons, (f"2.{minor}" for minor in range(first, end))))
