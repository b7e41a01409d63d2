"""``python -m tests.chaos``: real processes under faults, every answer compared. Exit code 0 = nothing bad, 1 = something.

python -m tests.chaos --transport tcp --minutes 4            two pairs, one fault at a time of every kind
python -m tests.chaos --transport tcp --minutes 4 --dense 3  three faults at a time, in any state of the cluster
python -m tests.chaos --pairs 1 --kinds kill                 one pair: streams survive the restart of either worker
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.run import ChaosPlan, run
from tests.support.transport_cells import CELLS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run once and print the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--transport", choices=CELLS, default="tcp")
    parser.add_argument("--minutes", type=float, default=4.0, help="how long faults are made (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=2, help="prefill and as many decode workers (default: %(default)s)")
    parser.add_argument("--dense", type=int, default=1, metavar="N", help="so many faults at a time (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS), help="of faults (default: all)")
    parser.add_argument("--clients", type=int, default=6, help="streams at a time (default: %(default)s)")
    parser.add_argument("--min-answers", type=int, default=0, help="go on until there are so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of questions and faults (default: a new one)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the goals there")
    parser.add_argument("--logs", type=Path, default=None, metavar="DIR", help="keep the processes' logs there")
    given = parser.parse_args(arguments)
    plan = ChaosPlan(
        transport=given.transport,
        minutes=given.minutes,
        num_pairs=given.pairs,
        num_at_a_time=given.dense,
        kinds=tuple(given.kinds),
        num_clients=given.clients,
        min_answers=given.min_answers,
        seed=secrets.randbelow(1 << 31) if given.seed is None else given.seed,
    )
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
        return _finish(plan, given.logs, given.json)
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as folder:
        return _finish(plan, Path(folder), given.json)


def _finish(plan: ChaosPlan, folder: Path, json_path: Path | None) -> int:
    report = run(plan, folder)
    print(report.text())
    if json_path is not None:
        json_path.write_text(report.json())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
