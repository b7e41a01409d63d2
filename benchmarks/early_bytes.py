"""How much of a transfer a request still waits for, if bytes move before they are needed.

    python benchmarks/early_bytes.py [--transports tcp shm nixl] [--repeats 5] [--json FILE] [--markdown] [--quick]

Each part is a module of its own: ``early_pull`` (a decode worker reads the sealed chunks of a prompt while the prefill worker
computes the rest).
"""

from __future__ import annotations

import early_pull
from common import Machine, Outcome, make_parser, publish

TRANSPORTS = ("tcp", "shm", "nixl")


def main() -> None:
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    arguments = parser.parse_args()
    machine = Machine.now()
    parts = {"early_pull": early_pull.measure(arguments)}
    tables = [table for part in parts.values() for table in part.tables]
    notes = [note for part in parts.values() for note in part.notes]
    goals = [goal for part in parts.values() for goal in part.goals]
    publish(Outcome(tables, notes, {name: part.figures for name, part in parts.items()}, goals), machine, arguments)


if __name__ == "__main__":
    main()
