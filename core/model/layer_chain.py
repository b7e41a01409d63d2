"""What lies between the attention of a layer and that of the next one, for a few rows, by one call of compiled C.

Owns the call of ``core/model/_layer_chain.c``, which is built when kvferry is installed if there is a C compiler, and the
memory for what is computed in between. The C code calls those functions of ``few_rows`` and ``compiled_layers`` that
``Decoder`` calls one by one: the results are the same bits, without eight calls from Python, and their tensors, for each layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from core.compiled import load_library
from core.model import compiled_layers, few_rows
from core.model.arch import ModelArch
from core.model.decoder_weights import LayerWeights
from core.model.few_rows import MAX_ROWS, FewRows
from core.model.fused_layers import CompiledLayerOps, LayerOps
from core.model.linear import Linear, PackedLinear

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_PARTS = ("kvferry_add_and_normalize", "kvferry_gate_and_multiply", "kvferry_rotate")  # of ``compiled_layers``


class _Linear(ctypes.Structure):
    """``struct linear`` of the C code."""

    _fields_ = (
        *((name, _POINTER) for name in ("weight", "bias")),
        *((name, _SIZE) for name in ("num_steps", "block", "out_features", "num_tiles")),
    )


class _Norm(ctypes.Structure):
    """``struct norm``."""

    _fields_ = (("weight", _POINTER), ("floor", ctypes.c_double))


class _Chain(ctypes.Structure):
    """``struct chain``."""

    _fields_ = (
        *((name, _POINTER) for name in ("multiply", "normalize", "gate", "rotate")),
        *((name, _Linear) for name in ("output", "gate_up", "down", "next_qkv")),
        *((name, _Norm) for name in ("mlp_norm", "next_norm")),
        *((name, _POINTER) for name in ("update", "normed", "wide", "gated", "heads")),
        *((name, _SIZE) for name in ("hidden_size", "inner_size", "gate_kind", "num_rotated", "head_dim", "is_bfloat16")),
    )


class LayerChain:
    """The links between the layers of one decoder. Not thread-safe: it owns the memory of what is computed in a link."""

    def __init__(self, arch: ModelArch, layers: Sequence[LayerWeights], dtype: torch.dtype) -> None:
        library, products, operations = built_library(), few_rows.built_library(), compiled_layers.built_library()
        assert library is not None, "the caller has looked"
        assert products is not None, "each linear has its few rows"
        assert operations is not None, "the layers' operations are compiled"
        num_heads, num_kv_heads, head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        sizes = {
            **dict.fromkeys(("update", "normed"), arch.hidden_size),
            **{"wide": 2 * arch.intermediate_size, "gated": arch.intermediate_size},
            "heads": (num_heads + 2 * num_kv_heads) * head_dim,
        }
        memory = {name: torch.empty((MAX_ROWS, size), dtype=dtype, device="cpu") for name, size in sizes.items()}
        functions = (products.kvferry_multiply_few_rows, *(getattr(operations, name) for name in _PARTS))
        addresses = [ctypes.cast(function, _POINTER).value for function in functions]
        self._function = library.kvferry_advance_layer
        self._kept = layers, memory  # the C code has their addresses
        self._links = [
            _Chain(
                *addresses,
                *(_linear(linear) for linear in (layer.output, layer.gate_up, layer.down, following.qkv)),
                *(_Norm(n.scaled_weight.data_ptr(), n.squared_floor) for n in (layer.mlp_norm, following.input_norm)),
                *(memory[name].data_ptr() for name in sizes),
                *(arch.hidden_size, arch.intermediate_size, compiled_layers.GATES[arch.activation]),
                *(0 if rope is None else num_heads + num_kv_heads, head_dim, dtype is torch.bfloat16),
            )
            for (layer, following), rope in zip(pairwise(layers), arch.ropes[1:], strict=True)
        ]
        heads = memory["heads"].view(MAX_ROWS, -1, head_dim)
        query, key_value = heads[:, :num_heads], heads[:, num_heads:].view(MAX_ROWS, 2, num_kv_heads, head_dim)
        self._views = [(query[:num_rows], key_value[:num_rows]) for num_rows in range(MAX_ROWS + 1)]

    def takes(self, hidden: Tensor) -> bool:
        """Return True if ``advance`` may be called with ``hidden`` ``[T, hidden_size]`` of a step."""
        return len(hidden) <= MAX_ROWS

    def advance(
        self, layer: int, hidden: Tensor, attended: Tensor, angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Finish ``layer`` and return query, and key with value, of the next one, as views that the next call overwrites.

        Args:
            layer: the number of one that is not the last.
            hidden: float32 ``[T, hidden_size]``, contiguous, updated in place.
            attended: ``[T, num_heads, head_dim]``, of the weights' dtype.
            angles: of the next layer's rope, by ``RotaryEmbedding.angles``; None if it has none.

        Returns: ``[T, num_heads, head_dim]`` and ``[T, 2, num_kv_heads, head_dim]``.
        """
        cos, sin = (None, None) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
        num_rows, attended = len(hidden), attended.contiguous()
        self._function(self._links[layer], hidden.data_ptr(), attended.data_ptr(), cos, sin, num_rows)
        return self._views[num_rows]


def make_layer_chain(arch: ModelArch, layers: Sequence[LayerWeights], ops: LayerOps) -> LayerChain | None:
    """Return the links between ``layers``; None where parts of them are not computed by compiled C, or there are others."""
    if built_library() is None or not isinstance(ops, CompiledLayerOps) or arch.activation != "silu":
        return None
    if any(layer.qk_norm is not None or layer.attended_norm or layer.mlp_output_norm for layer in layers):
        return None
    dtypes = {_dtype_of(linear) for layer in layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)}
    norms = (norm for layer in layers for norm in (layer.input_norm, layer.mlp_norm))
    dtypes |= {norm.output_dtype(torch.empty(0, dtype=torch.float32)) for norm in norms}
    dtype = dtypes.pop()
    return None if dtypes or dtype is None else LayerChain(arch, layers, dtype)


def _dtype_of(linear: Linear) -> torch.dtype | None:
    """Return the dtype of what ``FewRows`` computes of this layer, None if it does not."""
    return linear.few_rows.dtype if isinstance(linear, PackedLinear) and linear.few_rows is not None else None


def _linear(linear: Linear) -> _Linear:
    assert isinstance(linear, PackedLinear)
    assert isinstance(linear.few_rows, FewRows)
    return _Linear(*linear.few_rows.arguments)


@cache
def built_library() -> ctypes.CDLL | None:
    """Return the library, None if it was not built here or is not for this machine."""
    library = load_library(ctypes.CDLL, "_layer_chain", __package__, "kvferry_advance_layer")
    if library is not None:
        library.kvferry_advance_layer.restype = None
        library.kvferry_advance_layer.argtypes = [ctypes.POINTER(_Chain), *[_POINTER] * 4, _SIZE]
    return library
