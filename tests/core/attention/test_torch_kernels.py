"""Torch's kernels are called as each supported version expects it, or refused by name."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from core.attention import torch_kernels
from core.attention.torch_kernels import activate_paged_kernel, flash_attention_operator, varlen_kernel, varlen_kernel_with_sums
from core.errors import ConfigError

VARLEN = "torch.nn.attention.varlen"
BLOCK_TABLES_LACK = r"varlen_attn of torch \S+ lacks block_table, enable_gqa, seqused_k"


class AuxRequest(NamedTuple):
    lse: bool = False


def varlen_attn_of_2_11(  # noqa: PLR0917
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    raise AssertionError("it is not called")


def varlen_attn_of_2_12(  # noqa: PLR0917
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
    block_table=None,
    num_splits=None,
):
    return return_aux


@pytest.fixture(autouse=True)
def forget_torch():
    """Clear the caches of what is known of torch, which otherwise last as long as the process."""
    varlen_kernel.cache_clear()
    varlen_kernel_with_sums.cache_clear()
    yield
    varlen_kernel.cache_clear()
    varlen_kernel_with_sums.cache_clear()


@pytest.fixture
def replace_varlen(monkeypatch):
    """Put another torch's function in place, or none."""

    def replace(kernel):
        module = SimpleNamespace(AuxRequest=AuxRequest)
        if kernel is not None:
            module.varlen_attn = kernel
        monkeypatch.setitem(sys.modules, VARLEN, module)

    return replace


def test_a_kernel_with_block_tables_is_torchs_own(replace_varlen):
    replace_varlen(varlen_attn_of_2_12)
    assert varlen_kernel() is varlen_attn_of_2_12
    assert varlen_kernel_with_sums()(*range(7)) == AuxRequest(lse=True)


def test_what_a_version_lacks_is_named(replace_varlen, monkeypatch):
    replace_varlen(varlen_attn_of_2_11)
    with pytest.raises(ConfigError, match=BLOCK_TABLES_LACK):
        varlen_kernel()
    monkeypatch.setattr(torch_kernels, "_operator_takes_lengths", lambda: False)
    with pytest.raises(ConfigError, match="lacks enable_gqa, seqused_k"):
        varlen_kernel_with_sums()


def test_a_torch_without_the_function_is_refused(replace_varlen):
    replace_varlen(None)
    for find in (varlen_kernel, varlen_kernel_with_sums):
        with pytest.raises(ConfigError, match=r"torch \S+ has no varlen_attn"):
            find()


def test_after_an_older_function_is_an_operator_that_takes_lengths(replace_varlen):
    replace_varlen(varlen_attn_of_2_11)
    assert varlen_kernel_with_sums() is flash_attention_operator


def test_no_other_kernel_is_activated_for_a_torch_without_block_tables(replace_varlen, monkeypatch):
    replace_varlen(varlen_attn_of_2_11)
    activated = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    with pytest.raises(ConfigError, match=BLOCK_TABLES_LACK):
        activate_paged_kernel(torch.device("cuda"))
    assert activated == []


@pytest.mark.parametrize("window_size", [(-1, 0), (-1, -1), (7, 0)])
@pytest.mark.parametrize("find", [varlen_kernel_with_sums, lambda: flash_attention_operator])
def test_this_torch_takes_the_arguments_of_pages(find, window_size):
    """On the meta device, which computes shapes only. Which of the two is found here, the version says."""
    query, keys = (torch.empty(n, heads, 64, dtype=torch.bfloat16, device="meta") for n, heads in ((6, 9), (80, 3)))
    starts, key_starts = (torch.tensor(s, dtype=torch.int32, device="meta") for s in ([0, 3, 6], [16, 0, 80]))
    lengths = torch.tensor([16, 5], dtype=torch.int32, device="meta")
    output, sums = find()(
        query,
        keys,
        keys,
        starts,
        key_starts,
        3,
        16,
        scale=0.1,
        window_size=window_size,
        enable_gqa=True,
        seqused_k=lengths,
    )
    assert (output.shape, output.dtype) == (query.shape, torch.bfloat16)
    assert (set(sums.shape), sums.dtype) == ({6, 9}, torch.float32)
