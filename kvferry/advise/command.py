"""``kvferry advise``: its flags. The rest is imported when it runs, because every process imports the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from core.errors import ConfigError

_PLOT_SPEEDS = (0.5, 0.75, 1.0, 1.25, 1.5)  # of the larger goodput


def advise(  # noqa: PLR0913, PLR0917 - one parameter per flag
    trace: Annotated[Path, typer.Argument(help="Mooncake trace, or the log of a router; - = standard input.")],
    costs: Annotated[
        str, typer.Option(help="YAML file with the costs of a worker, or a known name (docs/advise.md).")
    ] = "qwen3-32b-2gpu",
    workers: Annotated[
        int, typer.Option(min=0, max=64, help="Workers to compare with; 0 = as many as the trace needs at least.")
    ] = 0,
    ttft_ms: Annotated[float, typer.Option(min=1, help="SLO: time to the first token.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=0.1, help="SLO: mean time between tokens of a request.")] = 50.0,
    itl_ms: Annotated[float, typer.Option(min=0, help="SLO: 99 % of the times between tokens; 0 = any.")] = 0.0,
    share: Annotated[float, typer.Option(min=0.5, max=0.999, help="Share of requests that must be within the SLO.")] = 0.95,
    model_error: Annotated[float, typer.Option(min=0, max=10, help="Gains up to this are within the model's error.")] = 0.1,
    min_workers: Annotated[int, typer.Option(min=0, help="Advise aggregated below this number of workers.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a plot here, as SVG.")] = None,
) -> None:
    """Say whether a trace is better served by prefill and decode workers, in which ratio, or by aggregated workers."""
    from kvferry.advise.cluster import Slo
    from kvferry.advise.costs import read_costs
    from kvferry.advise.report import decide, page
    from kvferry.advise.study import Comparison
    from kvferry.advise.trace import read_trace

    if not all(map(math.isfinite, (ttft_ms, tpot_ms, itl_ms, share, model_error))):
        raise ConfigError("the limits of the SLO are finite numbers", param="slo")
    found, known, slo = read_costs(costs), read_trace(trace), Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms, itl_ms=itl_ms or math.inf)
    comparison = Comparison(known, found, slo, share)
    study = comparison.study(workers)
    print(page(known, found, slo, share, study, decide(study, model_error, min_workers)))
    if plot is not None:
        from kvferry.advise.plot import draw

        sides = (study.aggregated, study.disaggregated)
        most = max(side.goodput.mean for side in sides) or known.rate
        rates = [speed * most for speed in _PLOT_SPEEDS]
        speeds = [rate / known.rate for rate in rates]
        curves = [(side.layout.name, comparison.shares(side.layout, speeds)) for side in sides]
        try:
            plot.write_text(draw(rates, curves, share))
        except OSError as error:
            raise ConfigError(f"cannot write {str(plot)!r}: {error.strerror}", param="plot") from None
        print(f"\nplot: {plot}")
