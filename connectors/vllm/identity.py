"""Whose KV it is: the model, and how vLLM computes and stores its KV, as values that two engines compare.

KV is read only from an engine of the same identity. Each field has a name, so that a refusal says what differs.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from core.errors import LayoutMismatch
from core.wire.kv import KVLayoutInfo

Value = Annotated[str, msgspec.Meta(max_length=512)]


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes the KV of a token, except the tokens before it.

    ``config`` is a digest of the model's configuration (layers, heads, rope, window). ``weights_epoch`` counts changes of the
    weights in place. LoRA adapters are part of block hashes, by name.
    """

    weights: Value
    revision: Value
    config: Value
    dtype: Value
    quantization: Value
    speculative: Value
    attention: Value  # backend, and on CPU the instruction set, by which it packs
    vllm: Value  # minor version
    weights_epoch: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ for different identities, the same in every process."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=32).digest()


def check_same_kv(ours: ModelIdentity, theirs: ModelIdentity, our_layout: KVLayoutInfo, their_layout: KVLayoutInfo) -> None:
    """Check that another engine's blocks can be used here.

    Raises:
        LayoutMismatch: they cannot; the message names each difference with both values.
    """
    differences = [
        f"{name} {getattr(them, name)!r} at the peer, {getattr(us, name)!r} here"
        for us, them in ((ours, theirs), (our_layout, their_layout))
        for name in us.__struct_fields__
        if getattr(them, name) != getattr(us, name)
    ]
    if differences:
        raise LayoutMismatch("the engines differ: " + "; ".join(differences))
