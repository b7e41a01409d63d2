"""The ``kvferry`` program, also as ``python -m kvferry``: handle signals first, then import the command line.

A process of a cluster can be told to leave at any moment, so its signal handlers come before the imports, which take seconds,
and it ends by ``exit_process``.
"""

from __future__ import annotations

import sys

from core.gc_freeze import without_collections
from core.process_signals import exit_on_signals, exit_process

PROCESSES = ("serve", "router", "encode", "prefill", "decode", "agent", "kvstore")


def main() -> None:
    """Run the command line."""
    is_process = sys.argv[1:2] != [] and sys.argv[1] in PROCESSES
    if is_process:
        exit_on_signals()
    with without_collections():
        from kvferry.cli import main as run

    try:
        run()
    except SystemExit as end:
        if is_process and isinstance(end.code, int | None):
            exit_process(end.code or 0)
        raise
    except Exception:
        if not is_process:
            raise
        import logging

        from core.log import event

        logging.getLogger(__name__).critical(event("process_bug"), exc_info=True)  # printing it could wait for a reader
        exit_process(1)


if __name__ == "__main__":
    main()
