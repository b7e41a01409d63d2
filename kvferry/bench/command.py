"""``kvferry bench``: flags, progress bar, table and JSON around ``load`` and ``report``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from core.errors import ConfigError
from kvferry.bench.client import RequestResult, Target
from kvferry.bench.load import run_load
from kvferry.bench.report import Distribution, Report, make_report, parse_slos
from kvferry.bench.workload import (
    BenchRequest,
    SyntheticShape,
    TraceShape,
    parse_range,
    synthetic_workload,
    trace_workload,
)


def bench(  # noqa: PLR0913, PLR0917 - one parameter per flag
    url: Annotated[str, typer.Option(help="Server to load, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name; empty = the first of /v1/models.")] = "",
    api_key: Annotated[str, typer.Option(help="Bearer token.")] = "",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 64,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Poisson arrivals per second; default: closed loop.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Prompt length: N or LOW:HIGH.")] = "256",
    output_tokens: Annotated[str, typer.Option(help="Output length: N or LOW:HIGH.")] = "64",
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that all prompts share.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace file instead of synthetic lengths.")] = None,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Multiplies the lengths of a trace.")] = 1.0,
    time_scale: Annotated[float, typer.Option(min=0, help="Multiplies the arrival times of a trace.")] = 1.0,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Cuts the prompts of a trace.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Cuts the outputs of a trace.")] = None,
    text: Annotated[bool, typer.Option(help="Send text prompts instead of token ids.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask the server to ignore end-of-sequence.")] = True,
    goodput: Annotated[list[str] | None, typer.Option(help="SLO as ttft:MS, tpot:MS or e2e:MS; repeatable.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest silence of the server.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Load an OpenAI-compatible server and report TTFT, ITL, E2E percentiles, throughput and goodput."""
    slos = parse_slos(goodput or [])
    if trace is None:
        prompt_low, prompt_high = parse_range(prompt_tokens, "prompt-tokens")
        output_low, output_high = parse_range(output_tokens, "output-tokens")
        shape = SyntheticShape(
            num_requests=num_requests,
            prompt_low=prompt_low,
            prompt_high=prompt_high,
            output_low=output_low,
            output_high=output_high,
            num_shared_prefix=shared_prefix,
            rate_per_s=rate,
            text=text,
        )
        requests = synthetic_workload(shape, seed)
        concurrency = concurrency or (8 if rate is None else None)
    else:
        cut = TraceShape(num_requests, length_scale, time_scale, max_prompt_tokens, max_output_tokens, text)
        requests = trace_workload(trace, cut)
    base_url = url.rstrip("/").removesuffix("/v1")
    target = Target(base_url=base_url, model=model or _first_model(base_url, api_key), api_key=api_key, ignore_eos=ignore_eos)
    results, duration_s = _run(target, requests, concurrency, timeout_s)
    report = make_report(results, duration_s, slos)
    print_report(report, Console())
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    if report.num_failed:
        raise typer.Exit(1)


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
    if report.goodput_per_s is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in report.slo_ms.items())
        console.print(f"goodput: {report.goodput_per_s:.2f} requests/s with {limits}")
    for message, count in report.errors.items():
        console.print(f"[red]{count} x {message}[/red]", highlight=False)


def _run(
    target: Target, requests: list[BenchRequest], concurrency: int | None, timeout_s: float
) -> tuple[list[RequestResult], float]:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests))
        return asyncio.run(
            run_load(
                target, requests, concurrency=concurrency, timeout_s=timeout_s, on_done=lambda _result: progress.advance(task)
            )
        )


def _first_model(base_url: str, api_key: str) -> str:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=10)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"cannot read the model name from {base_url}/v1/models ({error}); give --model", param="model"
        ) from None
