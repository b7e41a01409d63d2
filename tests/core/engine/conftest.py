"""Builders shared by the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from core.engine.sampling_state import SamplingRows, build_edits
from core.wire.sampling import SamplingParams


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def sampling_rows() -> Callable[..., SamplingRows]:
    """Return a builder of rows from (params, prompt, output[, choice_index[, stop_token_ids]]) tuples."""

    def build(*requests) -> SamplingRows:
        rows = SamplingRows(max(1, len(requests)))
        for row, (params, prompt, output, *rest) in enumerate(requests):
            choice_index = rest[0] if rest else 0
            stop = rest[1] if len(rest) > 1 else ()
            rows.put(row, params, choice_index, len(output), build_edits(params, stop, prompt, output))
        return rows

    return build


@pytest.fixture
def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0)
