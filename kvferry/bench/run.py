"""Runs a load with a progress bar and shows its report. Knows no flags (``kvferry.bench.command``)."""

from __future__ import annotations

import asyncio

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from core.errors import ConfigError
from kvferry.bench.client import RequestResult, Target
from kvferry.bench.load import run_load
from kvferry.bench.report import Distribution, Report
from kvferry.bench.workload import BenchRequest
from kvferry.server_address import bearer


def print_report(report: Report, console: Console) -> None:
    """Print the figures as a table of latencies and a few lines."""
    table = Table(title=f"{report.num_requests} requests in {report.duration_s:.1f} s, {report.num_failed} failed")
    for column in ("ms", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="left" if column == "ms" else "right")
    rows: tuple[tuple[str, Distribution | None], ...] = (
        ("time to first token", report.ttft_ms),
        ("inter-token latency", report.itl_ms),
        ("time per output token", report.tpot_ms),
        ("end to end", report.e2e_ms),
    )
    for name, values in rows:
        if values is not None:
            cells = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
            table.add_row(name, *(f"{cell:.1f}" for cell in cells))
    console.print(table)
    console.print(
        f"throughput: {report.request_throughput_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s, "
        f"{report.total_tokens_per_s:.1f} tokens/s"
    )
    console.print(
        f"tokens: {report.num_prompt_tokens} prompt ({report.num_cached_tokens} cached), {report.num_output_tokens} output"
    )
    if report.seed is not None:
        console.print(f"seed: {report.seed} (--seed {report.seed} sends the same prompts again)", highlight=False)
    if report.goodput_per_s is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in report.slo_ms.items())
        console.print(f"goodput: {report.goodput_per_s:.2f} requests/s with {limits}")
    for message, count in report.errors.items():
        console.print(f"[red]{count} x {message}[/red]", highlight=False)


def run_with_progress(
    target: Target, requests: list[BenchRequest], concurrency: int | None, timeout_s: float
) -> tuple[list[RequestResult], float]:
    """Return the results and the duration in seconds (see ``run_load``)."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests))
        return asyncio.run(
            run_load(
                target, requests, concurrency=concurrency, timeout_s=timeout_s, on_done=lambda _result: progress.advance(task)
            )
        )


def first_model(base_url: str, api_key: str) -> str:
    """Return the first name that the server lists.

    Raises:
        ConfigError: it lists none, or does not answer.
    """
    headers = bearer(api_key)
    try:
        response = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=10)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot read the model name from {base_url}/v1/models ({error}); give --model", param="model"
        ) from None
