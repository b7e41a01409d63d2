"""Whether KV should be compressed, without loss, on its way over a network or to a disk.

    python benchmarks/codec.py [--repeats 3] [--folder DIR] [--json FILE] [--markdown] [--quick]

The KV of a prompt of 2,048 tokens of text (this repository's documents) is computed by the engine, in bf16 and in fp32. Each of
its blocks is encoded and decoded by every codec of ``codec_candidates.py`` whose library is installed, and compared with what
it was. kvferry needs none but zlib (``pip install --target DIR zstandard lz4 blosc2 numexpr ndindex msgpack py-cpuinfo``
and ``PYTHONPATH=DIR``). Rates are bytes of KV per second of CPU time on one core, the fastest of the repeats.

A codec pays at a link of ``bw`` bytes per second
    in sequence   if  1/encode + 1/(ratio * bw) + 1/decode < 1/bw,  that is below  (1 - 1/ratio) / (1/encode + 1/decode)
    pipelined     if  both rates are higher than bw, at the price of one core on each side
The table has both limits. They are compared with the links measured here, the ``tcp`` transport over loopback and a file in
``--folder`` (written with ``fsync``, read after the kernel has dropped its pages), and with 1, 10 and 25 Gbit/s. Wall-clock
times of links suffer from other work on the machine; the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transport
from codec_candidates import LIBRARIES, Bytes, Codec, candidates
from common import Machine, Outcome, Table, make_parser, publish

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import build_engine
from core.model.tokenizer import Tokenizer
from core.request import NewRequest
from core.wire.sampling import SamplingParams

DTYPES = ("bfloat16", "float32")
PROMPT_TOKENS, QUICK_TOKENS = 2048, 128
NETWORKS = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "25 Gbit/s": 25e9 / 8}
FILE_BYTES, QUICK_FILE_BYTES = 512 << 20, 8 << 20
DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True, slots=True)
class Measured:
    """One codec on the blocks of one dtype; rates in bytes of KV per second and core."""

    dtype: str
    codec: str
    ratio: float
    encode_rate: float
    decode_rate: float

    @property
    def sequential_limit(self) -> float:
        """The fastest link, in bytes per second, at which encoding, sending and decoding in sequence takes less time."""
        return max(0.0, (1 - 1 / self.ratio) / (1 / self.encode_rate + 1 / self.decode_rate))

    @property
    def pipelined_limit(self) -> float:
        """Likewise where all three go on at once; 0 if nothing gets smaller."""
        return min(self.encode_rate, self.decode_rate) if self.ratio > 1 else 0.0


def real_blocks(model: str, dtype: str, num_tokens: int) -> list[Bytes]:
    """Compute a prompt of text and return the bytes of its full blocks."""
    settings = {"model.name": model, "model.device": "cpu", "model.dtype": dtype, "cache.memory_bytes": 256 << 20}
    built = build_engine(load_config(overrides=settings), SystemClock())
    text = "\n".join(path.read_text() for path in sorted(DOCUMENTS.glob("*.md")))
    prompt = Tokenizer(built.files).encode(text)[:num_tokens]
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    built.engine.add_request(NewRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling))
    while built.engine.has_work():
        built.engine.step()
    pool = built.pool.cache.pool
    blocks = pool.view(torch.uint8).reshape(len(pool), -1).numpy()
    num_blocks = num_tokens // built.pool.layout.block_size
    found = [block.copy() for block in blocks if block.any()][:num_blocks]
    built.engine.shutdown()
    if len(found) != num_blocks:
        raise RuntimeError(f"{len(found)} of {num_blocks} blocks hold anything")
    return found


def measure(codec: Codec, dtype: str, blocks: Sequence[Bytes], repeats: int) -> Measured:
    """Encode and decode all blocks.

    Raises:
        RuntimeError: a block has come back different.
    """
    num_bytes = sum(block.nbytes for block in blocks)
    encoded = [codec.encode(block) for block in blocks]
    for block, parts in zip(blocks, encoded, strict=True):
        if not np.array_equal(codec.decode(parts), block):
            raise RuntimeError(f"{codec.name} has changed a block")
    encode_s = fastest(repeats, lambda: [codec.encode(block) for block in blocks])
    decode_s = fastest(repeats, lambda: [codec.decode(parts) for parts in encoded])
    ratio = num_bytes / sum(len(part) for parts in encoded for part in parts)
    return Measured(dtype, codec.name, ratio, num_bytes / encode_s, num_bytes / decode_s)


def fastest(repeats: int, work: Callable[[], object]) -> float:
    """Return the least seconds of CPU time of this thread."""
    seconds = []
    for _ in range(repeats):
        begin = time.thread_time()
        work()
        seconds.append(time.thread_time() - begin)
    return min(seconds)


def tcp_rate(repeats: int, num_blocks: int) -> float:
    """Return the bytes per second of the ``tcp`` transport over loopback."""
    with redirect_stdout(sys.stderr):
        milliseconds = transport.measure(["tcp"], num_blocks, repeats)["tcp"]
    return num_blocks * transport.BLOCK_BYTES / min(milliseconds) * 1e3


def disk_rates(folder: Path, num_bytes: int, repeats: int) -> tuple[float, float]:
    """Return the bytes per second of writing a file to the disk, and of reading it again."""
    content = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8).data
    target = bytearray(num_bytes)
    written, read = [], []
    for _ in range(repeats):
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            begin = time.perf_counter()
            for start in range(0, num_bytes, 16 << 20):
                file.write(content[start : start + (16 << 20)])
            os.fsync(file.fileno())
            written.append(time.perf_counter() - begin)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            file.readinto(target)
            read.append(time.perf_counter() - begin)
    return num_bytes / min(written), num_bytes / min(read)


def make_outcome(found: Sequence[Measured], links: dict[str, float], num_tokens: int) -> Outcome:
    rows = [
        (
            f"{each.dtype}: {each.codec}",
            f"{each.ratio:.2f}",
            f"{each.encode_rate / 1e9:.2f}",
            f"{each.decode_rate / 1e9:.2f}",
            f"{each.sequential_limit / 1e9:.3f}",
            f"{each.pipelined_limit / 1e9:.2f}",
        )
        for each in found
    ]
    columns = ("KV, codec", "ratio", "encode, GB/s", "decode, GB/s", "in sequence below, GB/s", "pipelined below, GB/s")
    link_rows = [
        (name, f"{rate / 1e9:.2f}", *(best_at(found, rate, dtype) for dtype in DTYPES)) for name, rate in links.items()
    ]
    link_table = Table(("link", "GB/s", *(f"pays for {dtype}" for dtype in DTYPES)), link_rows)
    notes = (
        f"{num_tokens:,} tokens of text; rates by CPU time of one core; a codec with the filter alone is what the filter costs",
        f"codecs of {', '.join(LIBRARIES)} where they are installed",
    )
    rows_for_json = [
        {**asdict(each), "sequential_limit": each.sequential_limit, "pipelined_limit": each.pipelined_limit} for each in found
    ]
    return Outcome([Table(columns, rows), link_table], notes, {"links": links, "codecs": rows_for_json})


def best_at(found: Sequence[Measured], rate: float, dtype: str) -> str:
    """Name the codec that saves most time in sequence on a link, else the one of the highest ratio that pays pipelined."""
    ours = [each for each in found if each.dtype == dtype]
    in_sequence = [each for each in ours if each.sequential_limit > rate]
    if in_sequence:
        best = min(in_sequence, key=lambda each: 1 / each.encode_rate + 1 / (each.ratio * rate) + 1 / each.decode_rate)
        return f"in sequence: {best.codec}"
    pipelined = [each for each in ours if each.pipelined_limit > rate]
    return f"pipelined: {max(pipelined, key=lambda each: each.ratio).codec}" if pipelined else "none"


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is measured")
    arguments: argparse.Namespace = parser.parse_args()
    machine = Machine.now()
    torch.set_num_threads(1)
    repeats = 1 if arguments.quick else arguments.repeats
    num_tokens = QUICK_TOKENS if arguments.quick else PROMPT_TOKENS
    found = []
    for dtype in DTYPES:
        blocks = real_blocks(arguments.model, dtype, num_tokens)
        found += [measure(codec, dtype, blocks, repeats) for codec in candidates(getattr(torch, dtype).itemsize)]
    links = {"tcp over loopback": tcp_rate(repeats, transport.QUICK_BLOCKS if arguments.quick else transport.NUM_BLOCKS)}
    file_bytes = QUICK_FILE_BYTES if arguments.quick else FILE_BYTES
    links["disk, write"], links["disk, read"] = disk_rates(arguments.folder, file_bytes, repeats)
    publish(make_outcome(found, links | NETWORKS, num_tokens), machine, arguments)


if __name__ == "__main__":
    main()
