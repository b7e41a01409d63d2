"""All benchmarks, one after another: prints their tables, and keeps output and figures in a folder.

    python benchmarks/run_all.py [--quick] [--only NAME ...] [--trace FILE ...] [--corpus FOLDER] [--output bench-results]
                                 [--docs FILE]

``OUTPUT/NAME.json`` holds the figures of a benchmark, ``OUTPUT/NAME.md`` what it printed. ``--docs`` puts the latter into a
document, between its marks ``<!-- NAME -->`` and ``<!-- /NAME -->``. One benchmark that fails does not stop the others; the
exit code is 1 then. ``--trace`` adds the replay of traces, named ``trace_`` and the file's name. Without ``--corpus``, a
checkout of JSONSchemaBench, ``schema_corpus`` measures a part of its table, and ``--docs`` leaves that table as it is. Run it
on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script, its arguments, and which of the common ones it takes. ``quick`` are further arguments of a smoke run.

    ``script`` is the file's name without its ending; left out, it is ``name``. Two benchmarks may share one. ``environment``
    are variables, as ``NAME=value``. One that is partial does not measure all of its table, so it replaces none.
    """

    name: str
    quick: tuple[str, ...] = ("--quick",)
    writes_markdown: bool = True  # --markdown
    script: str = ""
    arguments: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    is_partial: bool = False

    @property
    def file_name(self) -> str:
        """The script's name inside the folder of benchmarks."""
        return f"{self.script or self.name}.py"


BENCHMARKS = (
    Benchmark("scheduler"),
    Benchmark("scheduler_peers", script="scheduler", arguments=("--peer",)),
    Benchmark("handoff_admission"),
    Benchmark("hybrid"),
    Benchmark("attention"),
    Benchmark("attention_avx2", script="attention", arguments=("--cpu", "avx2")),
    Benchmark("prefill_attention"),
    Benchmark("prefill_attention_avx2", script="prefill_attention", arguments=("--cpu", "avx2")),
    Benchmark("model", environment=("THP_MEM_ALLOC_ENABLE=1",)),
    Benchmark("quantized"),
    Benchmark("same_results"),
    Benchmark("same_results_avx2", script="same_results", arguments=("--cpu", "avx2")),
    Benchmark("engine", ("--repeats", "1"), False),
    Benchmark("engine_2_threads", ("--repeats", "1"), False, script="engine", arguments=("--threads", "2")),
    Benchmark("engine_peers", ("--repeats", "1"), False, script="engine", arguments=("--peers",)),
    Benchmark(
        "engine_peers_bfloat16",
        ("--repeats", "1"),
        False,
        script="engine",
        arguments=("--peers", "--dtype", "bfloat16"),
    ),
    Benchmark("transport"),
    Benchmark("codec"),
    Benchmark("handoff"),
    Benchmark("early_bytes"),
    Benchmark("plugin_digest"),
    Benchmark("vllm_plugin"),
    Benchmark("vllm_router"),
    Benchmark("tiers"),
    Benchmark("tiers_connector"),
    Benchmark("encoder"),
    Benchmark("photographs"),
    Benchmark("through_router"),
    Benchmark("multi_turn"),
    Benchmark("structured"),
    Benchmark("router_scale"),
    Benchmark("routing_index"),
    Benchmark("growth"),
    Benchmark(
        "disaggregation",
        ("--quick", "--repeats", "1"),
        arguments=("--chunks", "64", "256", "2048", "--requests", "15"),
    ),
    Benchmark("advised_sides", arguments=("--requests", "20", "--repeats", "2")),
    Benchmark("schema_corpus", is_partial=True),
    Benchmark("first_minutes"),
    Benchmark("cluster"),
    Benchmark("router_attack"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a benchmark."""

    benchmark: Benchmark
    exit_code: int
    output: str
    seconds: float


def run(benchmark: Benchmark, folder: Path, is_quick: bool) -> Run:
    """Run a script, show what it prints as it comes, and keep it."""
    arguments = [*benchmark.arguments, *(benchmark.quick if is_quick else ()), "--json", str(folder / f"{benchmark.name}.json")]
    if benchmark.writes_markdown:
        arguments.append("--markdown")
    command = [sys.executable, str(FOLDER / benchmark.file_name), *arguments]
    shown = [*benchmark.environment, "python", f"benchmarks/{benchmark.file_name}", *arguments]
    print(f"== {shlex.join(shown)}", flush=True)
    begin, lines = time.perf_counter(), []
    environment = os.environ | dict(variable.split("=", 1) for variable in benchmark.environment)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    print(flush=True)
    result = Run(benchmark, process.returncode, "".join(lines), time.perf_counter() - begin)
    if result.exit_code == 0:
        (folder / f"{benchmark.name}.md").write_text(as_markdown(result))
    return result


def as_markdown(result: Run) -> str:
    return result.output if result.benchmark.writes_markdown else f"```\n{result.output}```\n"


def put_into(document: Path, results: list[Run]) -> None:
    """Replace what stands between the marks of each benchmark that ran well and whole; one without marks is left out."""
    text = document.read_text()
    for result in results:
        if result.exit_code == 0 and not result.benchmark.is_partial:
            name = re.escape(result.benchmark.name)
            between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            output = as_markdown(result)
            text = between.sub(lambda found, output=output: f"{found[1]}\n{output}\n{found[2]}", text)  # type: ignore[misc]
    document.write_text(text)


def with_corpus(benchmark: Benchmark, folder: Path) -> Benchmark:
    """Return a benchmark that lacked the corpus with it, as the page has it: of every fourth schema."""
    if not benchmark.is_partial:
        return benchmark
    return replace(benchmark, arguments=("--corpus", str(folder), "--every", "4"), is_partial=False)


def main() -> int:
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smoke runs: figures without meaning")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--output", type=Path, default=Path("bench-results"), help="folder (default: %(default)s)")
    parser.add_argument("--trace", type=Path, nargs="+", default=[], metavar="FILE", help="traces to replay (tiers.py)")
    parser.add_argument("--corpus", type=Path, metavar="FOLDER", help="a checkout of JSONSchemaBench (schema_corpus.py)")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="document to put the tables into")
    arguments = parser.parse_args()
    if arguments.quick and arguments.docs is not None:
        parser.error("--docs wants figures that mean something, without --quick")
    arguments.output.mkdir(parents=True, exist_ok=True)
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name in arguments.only]
    if arguments.corpus is not None:
        chosen = [with_corpus(benchmark, arguments.corpus) for benchmark in chosen]
    for trace in arguments.trace:
        chosen.append(Benchmark(f"trace_{trace.stem}", script="tiers", arguments=("--trace", str(trace))))
    results = [run(benchmark, arguments.output, arguments.quick) for benchmark in chosen]
    if arguments.docs is not None:
        put_into(arguments.docs, results)
    for result in results:
        verdict = "done" if result.exit_code == 0 else f"FAILED with exit code {result.exit_code}"
        print(f"{result.benchmark.name:16s} {verdict} after {result.seconds:.0f} s")
    return int(any(result.exit_code for result in results))


if __name__ == "__main__":
    sys.exit(main())
