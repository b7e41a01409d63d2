"""docs/gpu.md lists every test that needs a GPU, and none that does not exist."""

from __future__ import annotations

import re
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
