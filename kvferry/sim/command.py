"""``kvferry sim``: play simulated clusters by their seeds, print what happened, or what many of them came to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from core.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.sim.faults import Fault


DRAWN = "drawn"


def sim(
    seed: Annotated[int, typer.Option(min=0, help="Which run to play; with --runs, the first.")] = 0,
    runs: Annotated[int, typer.Option(min=1, help="How many seeds, this one and those that follow.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="How many processes share the runs.")] = 1,
    faults: Annotated[str, typer.Option(help="Kinds of faults instead of those drawn: all, none, or some.")] = DRAWN,
    chunks: Annotated[
        bool, typer.Option("--chunks", help="Short runs: prompts that are read early, faults at boundaries of their chunks.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Without the event log of a single run.")] = False,
) -> None:
    """Play a whole cluster under virtual time with faults drawn from a seed; the same seed gives the same events."""
    from kvferry.sim.runs import run_seed, silence

    kinds = parse_kinds(faults)
    if chunks and kinds is not None:
        raise ConfigError("--faults: runs with --chunks draw their own", param="faults")
    silence()
    if runs > 1:
        raise typer.Exit(_play_many(seed, runs, jobs, kinds, is_chunked=chunks))
    result = run_seed(seed, kinds, is_chunked=chunks, keeps_log=not quiet)
    for line in result.log:
        print(line)
    for violation in result.violations:
        print(f"VIOLATION: {violation}")
    print(f"seed {seed}: {_listed(result.outcomes)} in {result.seconds:.1f} virtual seconds, {result.num_events} events")
    raise typer.Exit(0 if result.is_good else 1)


def _play_many(first: int, num_runs: int, num_processes: int, kinds: tuple[Fault, ...] | None, *, is_chunked: bool) -> int:
    from kvferry.sim.runs import Summary, command, run_in_processes

    total, started_at = Summary(), time.monotonic()
    for summary in run_in_processes(first, num_runs, kinds, num_processes, is_chunked=is_chunked):
        total.merge(summary)
        for failure in summary.failures:
            print(f"{command(failure.seed, kinds, is_chunked=is_chunked)}\n    {failure.violations[0]}", flush=True)
    print(f"{total.num_runs} runs, {total.num_events} events, {time.monotonic() - started_at:.0f} s, {len(total.failures)} bad")
    print(f"requests: {_listed(total.outcomes)}")
    print(f"happened: {_listed(total.happened)}")
    return 1 if total.failures else 0


def parse_kinds(text: str) -> tuple[Fault, ...] | None:
    """Return the kinds of faults that a flag names, None if the seed draws them.

    Raises:
        ConfigError: one is unknown; lists the known ones.
    """
    from kvferry.sim.faults import Fault

    if text == DRAWN:
        return None
    if text in {"all", "none"}:
        return tuple(Fault) if text == "all" else ()
    known = [kind.value for kind in Fault]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--faults: {name!r} is not a kind of fault; known: {', '.join(known)}", param="faults")
    return tuple(Fault(name) for name in names)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
