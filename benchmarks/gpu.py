"""Everything there is to know of one GPU in under 8 minutes, without a network.

    python benchmarks/gpu.py [--json FILE] [--models llama smollm2] [--only SECTION ...] [--set cache.block_size=256] [--smoke]

Weights are random, shapes are those of Llama-3.1-8B and SmolLM2-135M; numbers are compared with transformers on a small model.
Sections, in this order:

* numerics     greedy text of the engine, computed once more by transformers in float32 and in bfloat16
* ceilings     a copy on the device, a bfloat16 matrix product, copies to the host and back: what the rest is held against
* reads        shm and NIXL alone between two processes: the rows of a handoff in one read, side by side and scattered
* kernels      attention of decode rows, with the keys of a sequence split among more or fewer programs
* decode       output tokens/s by batch and context; the roofline reads every weight once and every context's keys and values,
               at the pace of the copy
* prefill      one prompt from its arrival to its first token; the roofline is its multiplications at the pace of the product
* host         how long the scheduler takes beside a step, and how much of a step the device is idle
* handoff      a prefill and a decode worker as two processes on this device, by each transport that works here
* transformers ``generate`` of the same weights, for comparison

A section that fails, does not fit or has no time left says so and stops no other, not even if it takes its process along
(``gpu_report``); what has been found until then is in the file. ``--smoke`` runs all of it with tiny shapes on the CPU: the
figures mean nothing, every line is run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import yaml
from common import Machine, Table, at_most
from gpu_ceilings import Ceilings, CeilingSize, measure_ceilings
from gpu_engine import EngineBench, EngineSize
from gpu_kernels import measure_attention
from gpu_models import LLAMA_8B, NUMERICS, SMOLLM2, TINY, Shape, write_model, write_small
from gpu_pair import PairSize, measure_pair, transports_here
from gpu_reads import ReadSize, measure_reads, readers_here
from gpu_reference import compare_numbers, generation_rates
from gpu_report import Report, measure_in_processes

SECTIONS = ("numerics", "ceilings", "reads", "kernels", "decode", "prefill", "host", "handoff", "transformers")
AIMS = {"decode": 0.75, "prefill": 0.55, "handoff": 0.70, "idle": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything is measured."""

    device: str
    dtype: str
    shapes: tuple[Shape, ...]
    numerics: Shape
    ceilings: CeilingSize
    engine: EngineSize
    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # tokens
    decode_steps: int
    prompts: tuple[int, ...]  # tokens
    prefill_repeats: int
    host_batch: int
    reads: ReadSize
    attention: tuple[tuple[int, int], ...]  # batch and context
    pair: PairSize
    generate: tuple[tuple[int, int], ...]  # batch and context
    generate_tokens: int


def full_plan(shapes: tuple[Shape, ...]) -> Plan:
    """Return what is measured on a GPU."""
    return Plan(
        device="cuda",
        dtype="bfloat16",
        shapes=shapes,
        numerics=NUMERICS,
        ceilings=CeilingSize(copy_bytes=2 << 30, matmul=8192, repeats=5),
        engine=EngineSize(max_num_seqs=256, max_context=8192 + 448, step_tokens=8192),
        batches=(256, 64, 32, 8, 1),
        contexts=(8192, 1024),
        decode_steps=24,
        prompts=(512, 2048, 8192),
        prefill_repeats=5,
        host_batch=64,
        reads=ReadSize(num_rows=128, row_bytes=2 << 20, repeats=9),  # 2,048 tokens of Llama-3.1-8B
        attention=((1, 1024), (8, 1024), (32, 1024), (64, 1024), (1, 8192), (8, 8192), (32, 8192)),
        pair=PairSize(
            engine=EngineSize(max_num_seqs=64, max_context=8192 + 448, step_tokens=8192, num_blocks=1024),
            prompt=2048,
            repeats=7,
            streams=8,
            stream_prompt=512,
            stream_tokens=256,
            busy_prompt=8192,
        ),
        generate=((1, 1024), (8, 1024)),
        generate_tokens=48,
    )


def smoke_plan() -> Plan:
    """Return the same with next to nothing in it, for a CPU."""
    tiny = EngineSize(max_num_seqs=4, max_context=128, step_tokens=64, num_blocks=24, dtype="float32")
    return Plan(
        device="cpu",
        dtype="float32",
        shapes=(TINY,),
        numerics=TINY,
        ceilings=CeilingSize(copy_bytes=1 << 20, matmul=64, repeats=1),
        engine=tiny,
        batches=(40, 2, 1),
        contexts=(64,),
        decode_steps=2,
        prompts=(32,),
        prefill_repeats=1,
        host_batch=2,
        reads=ReadSize(num_rows=4, row_bytes=4096, repeats=1),
        attention=(),
        pair=PairSize(engine=tiny, prompt=80, repeats=1, streams=2, stream_prompt=8, stream_tokens=6, busy_prompt=64),
        generate=((1, 16),),
        generate_tokens=2,
    )


def changed(plan: Plan, assignments: Sequence[str]) -> Plan:
    """Return a plan whose engines have these settings, each ``path=value`` with a value in YAML."""
    parts = [assignment.partition("=") for assignment in assignments]
    changes = tuple((path, yaml.safe_load(value)) for path, _, value in parts)
    pair = replace(plan.pair, engine=replace(plan.pair.engine, changes=changes))
    return replace(plan, engine=replace(plan.engine, changes=changes), pair=pair)


class GpuBenchmark:
    """All sections over one plan."""

    def __init__(self, plan: Plan, folder: Path, report: Report) -> None:
        self._plan = plan
        self._folder = folder
        self._report = report
        self._ceilings: Ceilings | None = None

    def run(self) -> None:
        plan, report = self._plan, self._report
        with report.part("numerics") as is_wanted:
            if is_wanted:
                self._numerics()
        self._measure_ceilings()
        for transport in readers_here(plan.device):
            with report.part("reads", transport) as is_wanted:
                if is_wanted:
                    self._reads(transport)
        for shape in plan.shapes:
            if not self._has_room(shape):
                report.notes.append(f"{shape.name}: its weights do not fit twice into this device's memory; left out")
                continue
            model = self._folder / shape.name
            with report.part("weights", shape.name, is_needed=True) as is_wanted:
                if is_wanted and not model.exists():
                    write_model(model, shape)
            if model.exists():
                self._measure_model(model, shape)

    def _measure_model(self, model: Path, shape: Shape) -> None:
        plan, report = self._plan, self._report
        if plan.device != "cpu":  # they are Triton's
            with report.part("kernels", shape.name) as is_wanted:
                if is_wanted:
                    self._kernels(shape)
        self._engine(model, shape)
        for transport in transports_here(plan.device):
            with report.part("handoff", f"{shape.name} {transport}") as is_wanted:
                if is_wanted:
                    self._handoff(model, shape, transport)
        with report.part("transformers", shape.name) as is_wanted:
            if is_wanted:
                self._transformers(model, shape)

    def _measure_ceilings(self) -> None:
        plan, report = self._plan, self._report
        with report.part("ceilings", is_needed=not report.figures.get("ceilings")) as is_wanted:
            if is_wanted:
                found = measure_ceilings(plan.device, getattr(torch, plan.dtype), plan.ceilings)
                report.keep("ceilings", plan.device, asdict(found))
                self._show_ceilings(found)
        if report.figures.get("ceilings"):
            self._ceilings = Ceilings(**report.figures["ceilings"][plan.device])

    def _reads(self, transport: str) -> None:
        for found in measure_reads(transport, self._plan.device, self._plan.reads):
            text = f"{found.ended_ms:.2f} ms for {found.num_bytes / 1e6:,.1f} MB, posting {found.posted_ms:.2f} ms"
            case = f"{transport}, {found.order}"
            self._report.add("reads", case, text, found.copy_ms / found.ended_ms)
            self._report.keep("reads", case, asdict(found))

    def _kernels(self, shape: Shape) -> None:
        """Show the time of each number of splits, the one that the engine would take first."""
        for batch, context, times in measure_attention(shape, self._plan.attention):
            case = f"{shape.name} {batch} x {context}"
            text = ", ".join(f"{splits} splits {us:.1f} us" for splits, us in times.items())
            self._report.add("kernels", case, text)
            self._report.keep("kernels", case, times)

    def _transformers(self, model: Path, shape: Shape) -> None:
        plan, report = self._plan, self._report
        rates = generation_rates(model, plan.device, plan.dtype, plan.generate, plan.generate_tokens)
        for batch, context, rate in rates:
            case = f"{shape.name} {batch} x {context}"
            report.add("transformers", case, f"{rate:,.0f} tokens/s")
            report.keep("transformers", case, rate)

    def _numerics(self) -> None:
        plan = self._plan
        folder = write_small(self._folder / "numerics", plan.numerics)
        found = compare_numbers(folder, plan.numerics, plan.device, plan.dtype, num_prompts=4)
        verdict = "agrees" if found.is_good else "DISAGREES"
        text = f"{verdict}: off by {found.ours:.2g} nats, transformers by {found.transformers:.2g}"
        self._report.add("numerics", f"{plan.numerics.name}, {plan.dtype}", text)
        self._report.keep("numerics", plan.dtype, asdict(found) | {"is_good": found.is_good})

    def _show_ceilings(self, ceilings: Ceilings) -> None:
        report = self._report
        report.add("ceilings", "device copy", f"{ceilings.copy_bytes_per_s / 1e9:,.0f} GB/s, read and written")
        report.add("ceilings", f"{self._plan.dtype} product", f"{ceilings.matmul_flops / 1e12:,.1f} TFLOP/s")
        to_host, to_device = ceilings.to_host_bytes_per_s / 1e9, ceilings.to_device_bytes_per_s / 1e9
        report.add("ceilings", "to host, to device", f"{to_host:,.1f}, {to_device:,.1f} GB/s, pinned")

    def _engine(self, model: Path, shape: Shape) -> None:
        """Measure one engine in one process: decode, prefill, host."""
        plan, report = self._plan, self._report
        decodes = [(f"{shape.name} {batch} x {context}", batch, context) for context in plan.contexts for batch in plan.batches]
        prefills = [(f"{shape.name} {num_tokens}", num_tokens) for num_tokens in plan.prompts]
        cases = (
            [("decode", case) for case, *_ in decodes] + [("prefill", case) for case, _ in prefills] + [("host", shape.name)]
        )
        if not any(report.is_left(section, case) for section, case in cases):
            return
        bench = None
        with report.part("engine", shape.name, is_needed=True) as is_wanted:
            if is_wanted:
                bench = EngineBench(model, shape, plan.engine, plan.device)
        if bench is None:
            return
        try:
            for case, batch, context in decodes:
                with report.part("decode", case) as is_wanted:
                    if is_wanted:
                        self._decode(bench, batch, context)
            for case, num_tokens in prefills:
                with report.part("prefill", case) as is_wanted:
                    if is_wanted:
                        self._prefill(bench, num_tokens)
            with report.part("host", shape.name) as is_wanted:
                if is_wanted:
                    self._host(bench)
        finally:
            bench.close()

    def _decode(self, bench: EngineBench, batch: int, context: int) -> None:
        plan, report, ceilings = self._plan, self._report, self._known_ceilings
        case = f"{bench.shape.name} {batch} x {context}"
        if not bench.fits(batch, context):
            report.add("decode", case, f"does not fit: the pool holds {bench.num_cached_tokens:,} tokens")
            return
        rate = bench.decode_rate(batch, context, plan.decode_steps)
        roofline = batch * ceilings.copy_bytes_per_s / bench.shape.decode_bytes(batch, context, bench.dtype_bytes)
        aim = AIMS["decode"] if batch <= 64 else None
        report.add("decode", case, f"{rate:,.0f} tokens/s", rate / roofline, aim)
        report.keep("decode", case, {"tokens_per_s": rate, "roofline_tokens_per_s": roofline})

    def _prefill(self, bench: EngineBench, num_tokens: int) -> None:
        report, ceilings = self._report, self._known_ceilings
        seconds = bench.prefill_s(num_tokens, self._plan.prefill_repeats)
        share = bench.shape.prefill_flops(num_tokens) / seconds / ceilings.matmul_flops
        case = f"{bench.shape.name} {num_tokens}"
        aim = AIMS["prefill"] if num_tokens == max(self._plan.prompts) else None
        report.add("prefill", case, f"{num_tokens / seconds:,.0f} tokens/s", share, aim)
        report.keep("prefill", case, {"seconds": seconds, "share": share})

    def _host(self, bench: EngineBench) -> None:
        found = bench.host_time(self._plan.host_batch, min(self._plan.contexts), self._plan.decode_steps)
        idle = found.idle_share
        text = f"{found.wall_ms:.2f} ms a step, scheduler {found.scheduler_ms:.2f} ms"
        if idle is not None:
            hidden = "hidden" if idle <= AIMS["idle"] else "NOT hidden"
            self._report.goals.append(at_most(f"host: {bench.shape.name}, device idle", idle, AIMS["idle"], "share"))
            text += f", device idle {100 * idle:.1f} %: {hidden}"
        self._report.add("host", f"{bench.shape.name} batch {self._plan.host_batch}", text)
        self._report.keep("host", bench.shape.name, asdict(found) | {"idle_share": idle})

    def _handoff(self, model: Path, shape: Shape, transport: str) -> None:
        report = self._report
        found = measure_pair(model, shape, self._plan.pair, self._plan.device, transport)
        case = f"{shape.name} {transport}"
        share = found.handoff_bytes_per_s / found.device_copy_bytes_per_s
        size = f"{found.transferred_bytes / 1e6:,.1f} MB"
        rate = f"{found.handoff_bytes_per_s / 1e9:,.1f} GB/s of {size}"
        report.add("handoff", case, rate, share, AIMS["handoff"] if self._plan.device != "cpu" and transport != "tcp" else None)
        report.add("handoff", f"{case}, first token", f"{found.ttft_ms:.1f} ms; alone {found.ttft_alone_ms:.1f} ms")
        report.add("handoff", f"{case}, added to the second", f"{found.added_ms:.1f} ms")
        quiet = f"{found.itl_alone_p50_ms:.1f} / {found.itl_alone_p99_ms:.1f} ms"
        busy = f"{found.itl_busy_p50_ms:.1f} / {found.itl_busy_p99_ms:.1f} ms while the other prefills"
        report.add("handoff", f"{case}, between tokens", f"p50 / p99 {quiet}; {busy}")
        fallbacks = f", {found.num_fallbacks} FALLBACKS" if found.num_fallbacks else ""
        text = f"{found.num_same_texts} of {found.num_texts} as computed by one worker{fallbacks}"
        report.add("handoff", f"{case}, texts", text)
        report.keep("handoff", case, asdict(found))

    def _has_room(self, shape: Shape) -> bool:
        """Say whether two workers with this model have room."""
        if self._plan.device == "cpu":
            return True
        return 2.6 * shape.num_bytes < torch.cuda.mem_get_info()[0]

    @property
    def _known_ceilings(self) -> Ceilings:
        assert self._ceilings is not None
        return self._ceilings


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--models", nargs="+", choices=("llama", "smollm2"), default=("llama", "smollm2"))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="change a setting of all engines")
    parser.add_argument("--minutes", type=float, default=8.0, help="no section is begun in the last minute of these")
    parser.add_argument("--folder", type=Path, help="where the weights are written (17 GB); default: a temporary folder")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU; the figures mean nothing")
    return parser.parse_args(arguments)


def describe_device(device: str) -> str:
    if device == "cpu":
        return "CPU"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def is_lost() -> bool:
    """Say whether this process can do nothing on the device any more, as behind an error of a kernel."""
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        return True
    return False


def measure(plan: Plan, folder: Path, report: Report) -> None:
    """Measure all that is left. Runs in a process of its own."""
    if plan.device == "cpu":
        torch.set_num_threads(1)
    else:
        report.is_device_lost = is_lost
    report.device = describe_device(plan.device)
    GpuBenchmark(plan, folder, report).run()
    report.send(has_ended=True)


def save(report: Report, path: Path | None, options: argparse.Namespace, begin: float) -> None:
    """Write all that is known by now."""
    if path is None:
        return
    content = {"device": report.device, "torch": torch.__version__, "seconds_in_all": time.monotonic() - begin}
    content |= {"smoke": options.smoke, "set": options.set, "goals": report.goals, "notes": report.notes, **report.figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the file; 1 if a section has failed."""
    options = parse(arguments)
    if not options.smoke and not torch.cuda.is_available():
        print("torch finds no CUDA device; --smoke runs everything with tiny shapes on the CPU", file=sys.stderr)
        return 2
    shapes: dict[str, Shape] = {"llama": LLAMA_8B, "smollm2": SMOLLM2}
    plan = smoke_plan() if options.smoke else full_plan(tuple(shapes[name] for name in options.models))
    plan = changed(plan, options.set)
    begin, machine = time.monotonic(), Machine.now()
    report = Report(begin + 60 * (options.minutes - 1), frozenset(options.only))
    with tempfile.TemporaryDirectory(prefix="kvferry-gpu-", dir=options.folder) as folder:
        last_s = begin + 60 * options.minutes - 10
        report = measure_in_processes(
            measure, (plan, Path(folder)), report, last_s, lambda state: save(state, options.json, options, begin)
        )
    print(Table(("", "found", "of the ceiling", "aim"), report.rows).text())
    elapsed = time.monotonic() - begin
    for note in (*report.notes, f"{report.device}; {machine}; {elapsed:.0f} s"):
        print(f"- {note}")
    if options.smoke:
        print("- a smoke run: the figures mean nothing")
    save(report, options.json, options, begin)
    return 1 if report.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
