"""The tensors of a checkpoint by name: read, checked, cast, moved and packed.

Owns the reading of safetensors files. Knows no architecture: ``core.model.loader`` and ``core.model.vision_loader`` request
tensors by name and shape. Tensors are read one at a time through a memory map, so the peak is the model plus one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ConfigError
from core.model.linear import Linear, MakeLinear, make_linear

_COMPARED_ROWS = 1024  # of a matrix, at once


@contextmanager
def open_checkpoint(
    weight_files: Sequence[Path], dtype: torch.dtype, device: torch.device | str, make: MakeLinear = make_linear
) -> Iterator[Checkpoint]:
    """Yield the tensors of safetensors files, in ``dtype`` and on ``device``, for as long as the block runs.

    ``make`` makes the linear layers that are read.

    Raises:
        ConfigError: a file cannot be read, or two hold a tensor of the same name.
    """
    with ExitStack() as open_files:
        yield Checkpoint(_open_all(weight_files, open_files), dtype, torch.device(device), make)


def _open_all(weight_files: Sequence[Path], open_files: ExitStack) -> dict[str, Any]:
    """Return {tensor name: open safetensors file}."""
    sources: dict[str, Any] = {}
    origins: dict[str, Path] = {}
    for path in weight_files:
        try:
            handle = open_files.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read as safetensors: {error}", param="model") from error
        names = handle.keys()
        for name in sorted(origins.keys() & names):
            raise ConfigError(
                f"{name} is in {origins[name]} and in {path}; keep the file that is meant, or name it model.safetensors",
                param="model",
            )
        sources.update(dict.fromkeys(names, handle))
        origins.update(dict.fromkeys(names, path))
    return sources


class Checkpoint:
    """The named tensors of a model; checks every shape, and at the end that all were used."""

    def __init__(self, sources: Mapping[str, Any], dtype: torch.dtype, device: torch.device, make: MakeLinear) -> None:
        self._sources = sources
        self._dtype = dtype
        self._device = device
        self._make_linear = make
        self._unused = set(sources)

    @property
    def dtype(self) -> torch.dtype:
        """Of every tensor that is read."""
        return self._dtype

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str, *shape: int) -> Tensor:
        """Read one tensor in the target dtype, on the target device, into memory of its own.

        A view of the file would keep all of the file mapped, and what was read of it resident.
        """
        return self._stored(name, shape).to(device=self._device, dtype=self._dtype, copy=True)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as it is stored: a view of the file, in the file's dtype."""
        if name not in self._sources:
            raise ConfigError(f"the weights lack {name}", param="model")
        tensor: Tensor = self._sources[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, the config says {shape}", param="model")
        self._unused.discard(name)
        return tensor

    def constant(self, value: float, *shape: int) -> Tensor:
        """Return a tensor of one value, for a weight that the checkpoint does not have."""
        return torch.full(shape, value, device=self._device, dtype=self._dtype)

    def linear(
        self, names: Sequence[str], rows: Sequence[int], columns: int, has_bias: bool, order: Tensor | None = None
    ) -> Linear:
        """Read one or several projections of the same input and fuse them into one layer, its rows in ``order``."""
        parts = list(zip(names, rows, strict=True))
        weight = self._fused([self._stored(f"{name}.weight", (size, columns)) for name, size in parts])
        bias = self._fused([self._stored(f"{name}.bias", (size,)) for name, size in parts]) if has_bias else None
        if order is not None:
            order = order.to(self._device)
            weight, bias = weight[order], None if bias is None else bias[order]
        return self._make_linear(weight, bias)

    def _fused(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of all parts as one tensor with memory of its own."""
        return torch.cat([part.to(device=self._device, dtype=self._dtype) for part in parts])

    def are_equal(self, name: str, other: str, *shape: int) -> bool:
        """Return True if two tensors have the same values in the dtype of this checkpoint; both count as used.

        They are compared some rows at a time where they are stored, so that neither is in memory twice.
        """
        stored = self._stored(name, shape), self._stored(other, shape)
        for start in range(0, shape[0], _COMPARED_ROWS):
            one, two = (tensor[start : start + _COMPARED_ROWS].to(self._dtype) for tensor in stored)
            if not torch.equal(one, two):
                return False
        return True

    def require_all_used(self, *prefixes: str, but: Sequence[str] = ()) -> None:
        """Refuse weights that the architecture does not use: computing without them would be silently wrong.

        Checks names that begin with one of ``prefixes``, or all without prefixes, except names that begin with one of
        ``but``: parts that are loaded elsewhere.
        """
        found = (name for name in self._unused if name.startswith(prefixes or "") and not name.startswith(tuple(but)))
        left = sorted(name for name in found if not name.endswith("rotary_emb.inv_freq"))
        if left:
            shown = ", ".join(left[:3])
            raise ConfigError(f"{len(left)} tensors have no place in this architecture: {shown}", param="model")
