"""The kernels of this build of torch for paged attention on CUDA: the one place that knows versions.

Owns the names of torch's functions and of the optional packages that provide them. Does not know: pools, batches, or whether a
kernel is right; ``core.attention.select`` probes that.

``torch.nn.attention.varlen.varlen_attn`` takes ``block_table``, ``seqused_k`` and ``enable_gqa`` from torch 2.12 on; its
signature is inspected. In torch 2.11 it takes none of them; there the underlying operator takes ``seqused_k``. The kernels of
torch itself (FlashAttention 2) refuse a block table; FlashAttention 3 (Hopper) and 4 (Blackwell) take one, and come in
packages of their own that replace them through ``activate_flash_attention_impl``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError

_LENGTHS_ARGUMENTS = frozenset({"return_aux", "window_size", "enable_gqa", "seqused_k"})
_PAGED_ARGUMENTS = frozenset({"window_size", "enable_gqa", "seqused_k", "block_table"})
_IMPLEMENTATIONS = {9: "FA3", 10: "FA4"}  # by the major number of the device's compute capability


@cache
def varlen_kernel() -> Callable[..., Any]:
    """Return torch's ``varlen_attn``. The import takes 2 s.

    Raises:
        ConfigError: this torch has none, or one that takes no block table; names the version.
    """
    kernel: Callable[..., Any] = _varlen_module().varlen_attn
    missing = _PAGED_ARGUMENTS - inspect.signature(kernel).parameters.keys()
    if missing:
        raise ConfigError(f"varlen_attn of torch {torch.__version__} lacks {', '.join(sorted(missing))}")
    return kernel


@cache
def varlen_kernel_with_sums() -> Callable[..., Any]:
    """Return torch's ``varlen_attn`` as a function that returns its output and the log-sum-exps of queries and heads.

    The order of their axes differs between its documentation and its source: tell them apart by their lengths.

    Raises:
        ConfigError: this torch has none that takes ``seqused_k``; names the version.
    """
    module = _varlen_module()
    kernel, aux = module.varlen_attn, module.AuxRequest(lse=True)
    missing = _LENGTHS_ARGUMENTS - inspect.signature(kernel).parameters.keys()
    if missing and _operator_takes_lengths():
        return flash_attention_operator
    if missing:
        raise ConfigError(f"varlen_attn of torch {torch.__version__} lacks {', '.join(sorted(missing))}")

    def attend(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's parameters
        return kernel(*args, return_aux=aux, **kwargs)

    return attend


def _varlen_module() -> Any:  # noqa: ANN401 - torch's module
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
        _ = module.varlen_attn, module.AuxRequest
    except (ImportError, AttributeError):
        raise ConfigError(f"torch {torch.__version__} has no varlen_attn") from None
    return module


def _operator_takes_lengths() -> bool:
    try:
        schema = torch.ops.aten._flash_attention_forward.default._schema
    except AttributeError:
        return False
    return {"window_size_left", "window_size_right", "seqused_k"} <= {argument.name for argument in schema.arguments}


def flash_attention_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *lengths: Any,  # noqa: ANN401 - torch's parameters
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    """Call the operator of torch 2.11's ``varlen_attn``, with its parameters and ``seqused_k``; return output and log-sum-exps.

    ``query``: ``[num_queries, num_heads, head_dim]``. ``key``, ``value``: ``[num_keys, num_kv_heads, head_dim]``, of its dtype.
    ``lengths``: where the queries, and the keys, of each sequence begin, int32 ``[num_seqs + 1]``, and the largest numbers of
    both. ``seqused_k``: int32 ``[num_seqs]`` or None. The output is as ``query``, the sums are float32.

    The operator is private to torch. It always shares KV heads among query heads, so ``enable_gqa`` is ignored.
    """
    left, right = options["window_size"]
    is_causal = (left, right) == (-1, 0)
    output, sums, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *lengths,
        0.0,  # no dropout
        is_causal,
        False,  # no mask for debugging
        scale=options["scale"],
        window_size_left=left,
        window_size_right=right,
        seqused_k=options["seqused_k"],
    )
    return output, sums


def activate_paged_kernel(device: torch.device) -> str | None:
    """Replace torch's FlashAttention by one that takes block tables; return its name, None if there is none.

    A process has one at a time; one that is active already stays. None on devices without such a package.

    Raises:
        ConfigError: there is one for this device, but its package is not installed; or torch takes no block table. Gives the
        reason.
    """
    attention = importlib.import_module("torch.nn.attention")
    current, activate = (
        getattr(attention, name, None) for name in ("current_flash_attention_impl", "activate_flash_attention_impl")
    )
    if device.type != "cuda" or current is None or activate is None:
        return None
    varlen_kernel()  # where torch does not pass block tables on, its own FlashAttention stays
    active: str | None = current()
    if active is not None:
        return active
    name = _IMPLEMENTATIONS.get(torch.cuda.get_device_capability(device)[0])
    if name is None:
        return None
    try:
        activate(name)
    except (ImportError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name}, which takes block tables on this device, is not there: {error}") from None
    return name


def upload(array: Any, device: torch.device) -> Tensor:  # noqa: ANN401 - an array of any shape and dtype
    """Return a copy of a host array on ``device``; the caller may change the array at once.

    To a CUDA device it goes through pinned memory and without waiting: kernels launched later see it.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True) if host.numel() else host.to(device)


def download(tensor: Tensor) -> Tensor:
    """Return a host tensor that holds ``tensor`` once the device has finished the work launched so far; does not wait.

    ``tensor`` is of any shape and dtype; on the host it is returned itself.
    """
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def refill(target: Tensor, array: Any) -> None:  # noqa: ANN401
    """Copy a host array into a tensor of its shape that a recorded graph reads, to its dtype; otherwise like ``upload``."""
    host = torch.from_numpy(array)
    if target.device.type != "cuda":
        target.copy_(host)
    else:
        target.copy_(host.pin_memory(), non_blocking=True)
