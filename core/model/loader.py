"""Loads safetensors files into a ``Decoder``: maps names, fuses projections.

Owns the Hugging Face names of a decoder's tensors. Knows nothing of the origin of files (``core.model.hub``) or how they are
read (``core.model.checkpoint``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ConfigError
from core.model.arch import VISION_WEIGHTS, ModelArch
from core.model.checkpoint import Checkpoint, open_checkpoint
from core.model.decoder import Decoder
from core.model.decoder_weights import DecoderWeights, LayerWeights
from core.model.embedding import Embedding, TableEmbedding, tied_embedding
from core.model.int8_linear import make_int8_linear
from core.model.layers import RMSNorm, residual_dtype
from core.model.linear import Linear, MakeLinear, make_linear


@dataclass(frozen=True, slots=True)
class _Names:
    """An architecture's own names and storage formats.

    ``mlp_norm``: the norm before the MLP. ``pairs_are_adjacent``: rope pairs are adjacent rows of queries and keys
    instead of half a head apart. ``norms_leave_one_out``: the weight of a norm is one more than the stored value.
    """

    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    pairs_are_adjacent: bool = False
    norms_leave_one_out: bool = False


_NAMES: Mapping[str, _Names] = {
    "gemma3_text": _Names(mlp_norm="pre_feedforward_layernorm", norms_leave_one_out=True),
    "llama4_text": _Names(mlp="feed_forward", pairs_are_adjacent=True),
}
_USUAL_NAMES = _Names()


def load_decoder(
    arch: ModelArch,
    weight_files: Sequence[Path],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    layer_groups: Sequence[Sequence[int]] | None = None,
    quantization: str = "none",
) -> Decoder:
    """Load the weights of ``arch`` from safetensors files into a decoder on ``device``.

    ``layer_groups``: the layers of each KV cache group; None for one group of all layers. ``quantization``: ``int8`` for 8-bit
    weights in the linear layers of attention and MLP; embeddings and the output layer keep ``dtype``.

    Raises:
        ConfigError: a file cannot be read, a tensor is missing, has another shape, or has no place in ``arch``, a tied head is
            another one in the files, or the machine cannot compute with quantized weights.
    """
    make: MakeLinear = make_int8_linear if quantization == "int8" else make_linear
    with open_checkpoint(weight_files, dtype, device, make) as tensors, torch.inference_mode():
        weights = _decoder_weights(tensors, arch)
        tensors.require_all_used(but=VISION_WEIGHTS if arch.weights_prefix != "model" else ())
    return Decoder(arch, weights, layer_groups or [range(arch.num_layers)])


def _decoder_weights(tensors: Checkpoint, arch: ModelArch) -> DecoderWeights:
    embedding, head = _embedding_and_head(tensors, arch)
    layers = tuple(_layer_weights(tensors, arch, number) for number in range(arch.num_layers))
    norm = _norm(tensors, arch, f"{arch.weights_prefix}.norm")
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, head=head)


def _embedding_and_head(tensors: Checkpoint, arch: ModelArch) -> tuple[Embedding, Linear]:
    name, own_head, shape = f"{arch.weights_prefix}.embed_tokens.weight", "lm_head.weight", (arch.vocab_size, arch.hidden_size)
    table = tensors.take(name, *shape)
    if not arch.tie_word_embeddings:
        return TableEmbedding(table), make_linear(tensors.take(own_head, *shape))
    if own_head in tensors and not tensors.are_equal(own_head, name, *shape):  # a head that was trained on its own
        raise ConfigError(
            f"{own_head} differs from {name}, but config.json says, or means by default, tie_word_embeddings: true; set it to "
            "false to use that head, or remove the tensor",
            param="tie_word_embeddings",
        )
    head = make_linear(table)
    return tied_embedding(table, head), head


def _layer_weights(tensors: Checkpoint, arch: ModelArch, number: int) -> LayerWeights:
    names, prefix = _names(arch), f"{arch.weights_prefix}.layers.{number}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.{names.mlp}"
    query_size = arch.num_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    gate_up_names = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    has_post_norms = arch.has_post_norms
    return LayerWeights(
        input_norm=_norm(tensors, arch, f"{prefix}.input_layernorm"),
        qkv=_qkv(tensors, arch, attention),
        qk_norm=_qk_norm(tensors, arch, number, attention),
        output=tensors.linear([f"{attention}.o_proj"], [hidden], query_size, arch.attention_output_bias),
        attended_norm=_post_norm(tensors, arch, f"{prefix}.post_attention_layernorm") if has_post_norms else None,
        mlp_norm=_norm(tensors, arch, f"{prefix}.{names.mlp_norm}"),
        gate_up=tensors.linear(gate_up_names, [inner, inner], hidden, arch.mlp_bias),
        down=tensors.linear([f"{mlp}.down_proj"], [hidden], inner, arch.mlp_bias),
        mlp_output_norm=_post_norm(tensors, arch, f"{prefix}.post_feedforward_layernorm") if has_post_norms else None,
    )


def _names(arch: ModelArch) -> _Names:
    return _NAMES.get(arch.model_type, _USUAL_NAMES)


def _norm(tensors: Checkpoint, arch: ModelArch, name: str) -> RMSNorm:
    """Return a norm whose result is the input of linears."""
    return RMSNorm(_norm_weight(tensors, arch, name, arch.hidden_size), arch.rms_norm_eps, tensors.dtype)


def _post_norm(tensors: Checkpoint, arch: ModelArch, name: str) -> RMSNorm:
    """Return a norm whose result is added to the residual sum."""
    weight = _norm_weight(tensors, arch, name, arch.hidden_size)
    return RMSNorm(weight, arch.rms_norm_eps, residual_dtype(weight.device, tensors.dtype))


def _norm_weight(tensors: Checkpoint, arch: ModelArch, name: str, size: int) -> Tensor:
    weight = tensors.take(f"{name}.weight", size)
    # In bf16, 1 + w would lose up to half of the bits of w.
    return weight.float() + 1.0 if _names(arch).norms_leave_one_out else weight


def _qkv(tensors: Checkpoint, arch: ModelArch, attention: str) -> Linear:
    """Return the fused projection to query, key and value heads, rope pairs half a head apart."""
    sizes = [heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
    names = [f"{attention}.{name}_proj" for name in ("q", "k", "v")]
    order = None
    if _names(arch).pairs_are_adjacent:
        halves = torch.arange(sizes[0] + sizes[1]).view(-1, arch.head_dim // 2, 2).transpose(1, 2).flatten()
        order = torch.cat((halves, torch.arange(sizes[0] + sizes[1], sum(sizes))))
    return tensors.linear(names, sizes, arch.hidden_size, arch.qkv_bias, order)


def _qk_norm(tensors: Checkpoint, arch: ModelArch, layer: int, attention: str) -> Tensor | None:
    """Return ``[num_heads + num_kv_heads, head_dim]``, so that one multiplication serves query and key heads."""
    if arch.qk_norm == "weighted":
        query = _norm_weight(tensors, arch, f"{attention}.q_norm", arch.head_dim)
        key = _norm_weight(tensors, arch, f"{attention}.k_norm", arch.head_dim)
        return torch.cat((query.expand(arch.num_heads, -1), key.expand(arch.num_kv_heads, -1)))
    if arch.qk_norm == "unit" and arch.ropes[layer] is not None:
        return tensors.constant(1.0, arch.num_heads + arch.num_kv_heads, arch.head_dim)
    return None
