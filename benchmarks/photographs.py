"""Large images beside text: what text requests of an engine lose while a photograph of 12 million pixels is decoded.

    python benchmarks/photographs.py [--repeats 15] [--json FILE] [--markdown] [--quick]

Text requests generate side by side in one engine, in this process. In two of three runs of a repeat a request with a photograph
comes, another file each time: decoded on a thread beside the engine's, as workers do it, or within the step that embeds it.
What counts are the text tokens within a second of that, and the longest time from one step to the next, when no request gets
a token. The order of the runs rotates. The model is a small random one, whose own steps are short; it cuts the photograph into
few tiles, so that nearly all of the work is decoding. Figures are medians (smallest..largest).
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import Machine, Outcome, Spread, Table, make_parser, publish
from encoder import Engine, settings_of
from PIL import Image

from tests.support.tiny_smolvlm import build_tiny_smolvlm

SIZE = (4000, 3000)
WINDOW_S = 1.0


def make_photo() -> bytes:
    """Return a JPEG file with the pixels, and roughly the bytes, of a photograph."""
    coarse = np.random.default_rng(0).integers(0, 256, (SIZE[1] // 10, SIZE[0] // 10, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(SIZE).save(file, "JPEG", quality=90)
    return file.getvalue()


def measure(model: Path, arguments: argparse.Namespace) -> Outcome:
    config, photo = settings_of(model), make_photo()
    beside, within = Engine(config), Engine(config, decodes_beside=False)
    runs = [("alone", beside, False), ("decoded on a thread beside", beside, True), ("decoded in the step", within, True)]
    found: dict[str, list[tuple[int, float]]] = {name: [] for name, _, _ in runs}
    for repeat in range(arguments.repeats):
        for place in range(len(runs)):
            name, engine, shows = runs[(repeat + place) % len(runs)]
            file = photo + (repeat * len(runs) + place).to_bytes(8)  # what follows the end of a JPEG makes it another file
            found[name].append(engine.count_and_time(WINDOW_S, file if shows else None))
    for engine in (beside, within):
        engine.close()
    rows = []
    for name, measured in found.items():
        counts, gaps = zip(*measured, strict=True)
        rows.append([name, Spread.of([count / WINDOW_S for count in counts]).show(0), Spread.of(gaps).show(0, 1e3)])
    table = Table(["photograph", "text tokens/s", "longest step, ms"], rows)
    return Outcome([table], [f"a JPEG of {SIZE[0]} x {SIZE[1]} pixels, {len(photo) / 1e6:.1f} MB"], figures=dict(found))


def main() -> int:
    parser = make_parser(__doc__ or "", repeats=15, takes_model=False)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats = 1
    torch.set_num_threads(1)
    machine = Machine.now()
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_smolvlm(Path(folder))
        publish(measure(Path(folder), arguments), machine, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
