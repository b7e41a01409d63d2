"""Whose KV it is: the model, and how vLLM computes and stores its KV, as values that two engines compare.

KV is read only from an engine of the same identity. Each field has a name, so that a refusal says what differs.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from core.errors import LayoutMismatch

Value = Annotated[str, msgspec.Meta(max_length=512)]

_EPOCH_HINT = "once both have the same weights, reset the one with the lower epoch, or restart both"


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes the KV of a token, except the tokens before it.

    ``config`` is a digest of the model's configuration (layers, heads, rope, window). ``weights_epoch`` counts the resets of
    vLLM's caches that follow changes of the weights in place; it does not say which weights they are. LoRA adapters are part of
    block hashes, by name.
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


def check_same_model(ours: ModelIdentity, theirs: ModelIdentity) -> None:
    """Check that another engine computes the same KV.

    Raises:
        LayoutMismatch: it does not; the message names each difference with both values.
    """
    names = [name for name in ours.__struct_fields__ if getattr(theirs, name) != getattr(ours, name)]
    if not names:
        return
    differences = "; ".join(f"{name} {getattr(theirs, name)!r} at the peer, {getattr(ours, name)!r} here" for name in names)
    hint = f": {_EPOCH_HINT}" if names == ["weights_epoch"] else ""
    raise LayoutMismatch(f"the engines differ: {differences}{hint}")
