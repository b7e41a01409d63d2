"""Fetching a model is never silent."""

from __future__ import annotations

import io
import sys

from rich.console import Console
from rich.progress import Progress as RichProgress

from core.model.progress import bytes_below
from kvferry.progress import BarProgress, LineProgress, shown_progress


def test_without_a_terminal_there_are_lines_with_bytes(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with shown_progress() as progress:
        assert isinstance(progress, LineProgress)
        progress.show("fetching m", 34_000_000, 93_000_000)
        progress.show("fetching n", 1_000_000, 0)
    assert sys.stderr.getvalue() == "fetching m: 34 of 93 MB\nfetching n: 1 MB\n"


def test_a_terminal_gets_one_bar_for_each_task():
    bars = RichProgress(console=Console(file=io.StringIO()))
    progress = BarProgress(bars)
    for num_bytes in (0, 5, 9):
        progress.show("fetching m", num_bytes, 9)
    progress.show("fetching n", 3, 0)
    assert [(task.description, task.completed, task.total) for task in bars.tasks] == [
        ("fetching m", 9, 9),
        ("fetching n", 3, None),
    ]


def test_files_count_whose_names_match(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.whl").write_bytes(b"12345")
    (tmp_path / "x.tmp").write_bytes(b"123")
    assert (bytes_below(tmp_path), bytes_below(tmp_path, "*.whl"), bytes_below(tmp_path / "no")) == (8, 5, 0)
