"""``kvferry doctor``: whether kvferry can run here with these settings, and what to do about what it finds.

Owns the command and how findings are shown. Exit code 0: nothing stands in the way; 1: something does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from core.config import KVFerryConfig
from kvferry import doctor_checks, options
from kvferry.doctor_checks import Finding
from kvferry.doctor_memory import memory

_MARKS = {"ok": "ok  ", "warning": "WARN", "failure": "FAIL"}
_CHECKS = (
    doctor_checks.check_versions,
    doctor_checks.check_model,
    doctor_checks.check_memory,
    doctor_checks.check_transports,
    doctor_checks.check_ports,
    doctor_checks.check_peers,
    doctor_checks.check_security,
)

doctor = typer.Typer(invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)


@doctor.callback()
def examine(
    context: typer.Context,
    url: Annotated[str, typer.Option("--url", help="A router, http://host:port, to compare clocks with.")] = "",
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Look for what stands in the way of running here with these settings: libraries, memory, ports, peers, keys."""
    if context.invoked_subcommand is not None:
        return
    findings = list(findings_of(options.read_config(config, assignments, {}), url))
    for finding in findings:
        print(f"{_MARKS[finding.verdict]}  {finding.subject}: {finding.text}")
        if finding.verdict != "ok" and finding.fix:
            print(f"      → {finding.fix}")
    raise typer.Exit(int(any(finding.verdict == "failure" for finding in findings)))


doctor.command()(memory)


def findings_of(config: KVFerryConfig, url: str = "") -> Iterator[Finding]:
    """Return what all checks find, in a fixed order."""
    for check in _CHECKS:
        yield from check(config)
    if url:
        yield from doctor_checks.check_clock(url)
