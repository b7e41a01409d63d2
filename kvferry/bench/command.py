"""``kvferry bench``: flags around ``load`` and ``report``.

Everything else is imported when the command runs: every process of a cluster imports the command line, and needs no HTTP
client.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from core.config_tree import check_text
from core.errors import ConfigError
from kvferry.server_address import check_address

DEFAULT_NUM_REQUESTS = 64  # of a synthetic workload
DEFAULT_PROMPT = "256"  # tokens
DEFAULT_OUTPUT = "64"  # tokens

Seed = Annotated[
    int | None,
    typer.Option(
        min=0, help="Seed of the workload; one that was used before finds its prompts cached.", show_default="a new one"
    ),
]


def bench(  # noqa: PLR0913, PLR0917 - one parameter per flag
    url: Annotated[str, typer.Option(help="Server to load, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name; empty = the first of /v1/models.")] = "",
    api_key: Annotated[str, typer.Option(help="Bearer token.")] = "",
    num_requests: Annotated[int | None, typer.Option(min=1, help="Requests to send; default 64, or the whole trace.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most requests at once.")] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Poisson arrivals per second; default: closed loop.")] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Prompt length: N or LOW:HIGH; default 256.")] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Output length: N or LOW:HIGH; default 64.")] = None,
    shared_prefix: Annotated[int | None, typer.Option(min=0, help="Tokens that all prompts share; default 0.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace file instead of synthetic lengths.")] = None,
    length_scale: Annotated[float, typer.Option(min=1e-6, help="Multiplies the lengths of a trace.")] = 1.0,
    time_scale: Annotated[float, typer.Option(min=0, help="Multiplies the arrival times of a trace.")] = 1.0,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Cuts the prompts of a trace.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Cuts the outputs of a trace.")] = None,
    text: Annotated[bool, typer.Option(help="Send text prompts instead of token ids.")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="Ask the server to ignore end-of-sequence.")] = True,
    goodput: Annotated[list[str] | None, typer.Option(help="SLO as ttft:MS, tpot:MS or e2e:MS; repeatable.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest silence of the server.")] = 600.0,
    seed: Seed = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
) -> None:
    """Load an OpenAI-compatible server and report TTFT, ITL, E2E percentiles, throughput and goodput."""
    import msgspec
    from rich.console import Console

    from kvferry.bench.client import Target
    from kvferry.bench.report import make_report, parse_slos
    from kvferry.bench.run import first_model, print_report, run_with_progress
    from kvferry.bench.workload import SyntheticShape, TraceShape, new_seed, parse_range, synthetic_workload, trace_workload

    base_url = _base_url(url, model)
    slos, seed = parse_slos(goodput or []), new_seed() if seed is None else seed
    if trace is None:
        prompt_low, prompt_high = parse_range(prompt_tokens or DEFAULT_PROMPT, "prompt-tokens")
        output_low, output_high = parse_range(output_tokens or DEFAULT_OUTPUT, "output-tokens")
        shape = SyntheticShape(
            num_requests=num_requests or DEFAULT_NUM_REQUESTS,
            prompt_low=prompt_low,
            prompt_high=prompt_high,
            output_low=output_low,
            output_high=output_high,
            num_shared_prefix=shared_prefix or 0,
            rate_per_s=rate,
            text=text,
        )
        requests = synthetic_workload(shape, seed)
        concurrency = concurrency or (8 if rate is None else None)
    else:
        lengths = {"prompt-tokens": prompt_tokens, "output-tokens": output_tokens, "shared-prefix": shared_prefix}
        _refuse_beside_trace({"rate": rate, **lengths})
        cut = TraceShape(num_requests, length_scale, time_scale, max_prompt_tokens, max_output_tokens, text, seed=seed)
        requests = trace_workload(trace, cut)
    model = model or first_model(base_url, api_key)
    target = Target(base_url=base_url, model=model, api_key=api_key, ignore_eos=ignore_eos)
    _check_writable(json_file)  # before the load, so that its figures are not lost
    results, duration_s = run_with_progress(target, requests, concurrency, timeout_s)
    print_report(report := msgspec.structs.replace(make_report(results, duration_s, slos), seed=seed), Console())
    _write(json_file, msgspec.json.format(msgspec.json.encode(report), indent=2), "wb")
    raise typer.Exit(1 if report.num_failed else 0)


def _base_url(url: str, model: str) -> str:
    """Return the address up to and without /v1. Both are checked."""
    check_address(url, "--url")
    check_text({"--model": model})
    return url.rstrip("/").removesuffix("/v1")


def _check_writable(path: Path | None) -> None:
    if path is not None and not path.is_fifo():  # whose reader would leave
        _write(path, b"", "ab")


def _write(path: Path | None, figures: bytes, mode: str) -> None:
    if path is None:
        return
    try:
        with path.open(mode) as file:
            file.write(figures)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--json = {path}: it cannot be written ({reason}): name another file", param="json") from None


def _refuse_beside_trace(flags: Mapping[str, object]) -> None:
    """Refuse flags of a synthetic workload together with a trace, which has its own lengths and arrival times."""
    for name, value in flags.items():
        if value is not None:
            raise ConfigError(
                f"--{name} shapes a synthetic workload and has no meaning with --trace: leave one out", param=name
            )
