"""``kvferry doctor``: whether kvferry can run here with these settings, and what to do about what it finds.

Owns the command and how findings are shown. Exit code 0: nothing stands in the way; 1: something does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from core.config import KVFerryConfig
from kvferry import options
from kvferry.cluster_plan import is_for_serve, with_ec_connector
from kvferry.doctor_memory import memory
from kvferry.server_address import check_address

if TYPE_CHECKING:
    from kvferry.finding import Finding

_MARKS = {"ok": "ok  ", "warning": "WARN", "failure": "FAIL"}

doctor = typer.Typer(invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)


@doctor.callback()
def examine(
    context: typer.Context,
    url: Annotated[str, typer.Option("--url", help="A router, http://host:port, whose clock and model to compare.")] = "",
    engines: Annotated[
        list[str] | None, typer.Option("--engine", help="A vLLM server, http://host:port, to look at; repeatable.")
    ] = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
) -> None:
    """Look for what stands in the way of running here with these settings: libraries, memory, ports, peers, keys."""
    if context.invoked_subcommand is not None:
        return
    findings = list(findings_of(options.read_config(config, assignments, {}), url, engines or ()))
    for finding in findings:
        print(f"{_MARKS[finding.verdict]}  {finding.subject}: {finding.text}")
        if finding.verdict != "ok" and finding.fix:
            print(f"      → {finding.fix}")
    raise typer.Exit(int(any(finding.verdict == "failure" for finding in findings)))


doctor.command()(memory)


def findings_of(config: KVFerryConfig, url: str = "", engines: Sequence[str] = ()) -> Iterator[Finding]:
    """Return what all checks find, in a fixed order; with ``engines`` only what these vLLM servers show.

    Raises:
        ConfigError: ``url`` or one of ``engines`` is no address of a server.
    """
    # Only when asked: every process of a cluster imports the command line.
    from kvferry import doctor_checks, doctor_peers, doctor_vllm

    for each in engines:
        check_address(each, "--engine")
    if url:
        check_address(url, "--url")
    if engines:
        yield from doctor_vllm.check_engines(engines, config)
        return
    if is_for_serve(config):
        config = with_ec_connector(config)
    for check in doctor_checks.CHECKS:
        yield from check(config)
    if url:
        yield from doctor_peers.check_clock(url)
        yield from doctor_peers.check_served_model(config, url)
