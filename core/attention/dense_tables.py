"""Block tables as dense arrays ``[N, pages]``, for kernels that are recorded once per width.

Owns the padding of rows of unequal length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.attention.base import AttentionBatch

IntArray = npt.NDArray[np.int64]


def decode_arrays(batch: AttentionBatch, decoding: npt.NDArray[np.integer], block_size: int) -> tuple[IntArray, IntArray]:
    """Return block tables ``[N, pages]`` and lengths ``[N]`` of these rows; entries after a row's end name the null block."""
    seq_lens = batch.seq_lens[decoding].astype(np.int64)
    num_pages = -(-int(seq_lens.max(initial=0)) // block_size)
    tables = batch.block_tables[decoding, :num_pages].astype(np.int64)
    tables[np.arange(num_pages) >= -(-seq_lens[:, None] // block_size)] = 0
    return tables, seq_lens


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... below ``largest``, and ``largest`` itself."""
    widths: list[int] = []
    while not widths or widths[-1] < largest:
        widths.append(min(1 << len(widths), largest))
    return tuple(widths)
