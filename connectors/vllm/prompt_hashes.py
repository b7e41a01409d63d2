"""Block hashes of vLLM's requests: kvferry's own chain over their prompts, independent of vLLM's version and block size.

The keys that vLLM mixes into its own hashes are in ours too: LoRA by name, ``cache_salt``, and images and other media by
their identifiers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

from core.constants import HASH_BLOCK_SIZE
from core.kv.hashing import BlockHasher, ExtraKey, RequestKeys


class VllmRequest(Protocol):
    """What is used of ``vllm.v1.request.Request``."""

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: Sequence[Any]
    lora_request: Any
    cache_salt: str | None
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    resumable: bool
    abort_immediately: bool
    status: Any


def can_be_hashed(request: VllmRequest) -> bool:
    """Return True if the prompt is known as tokens, all of them now."""
    return bool(request.prompt_token_ids) and request.prompt_embeds is None and not request.resumable


class PromptHashes:
    """The chain of one prompt."""

    def __init__(self, hasher: BlockHasher, request: VllmRequest) -> None:
        assert request.prompt_token_ids is not None, "only prompts of tokens are hashed"
        self._hasher = hasher
        self._token_ids = array("i", request.prompt_token_ids)
        self._extra_keys = _extra_keys(request)
        self._chain = hasher.hash_request_blocks(self._token_ids, self._extra_keys)

    def is_of(self, hasher: BlockHasher, request: VllmRequest) -> bool:
        """Return True if the request's prompt has this chain. To compare prompts takes a fraction of hashing one."""
        token_ids = array("i", request.prompt_token_ids or ())
        return self._hasher is hasher and self._token_ids == token_ids and self._extra_keys == _extra_keys(request)

    def at(self, num_tokens: int) -> bytes:
        """Return the hash of the first ``num_tokens`` tokens."""
        return self._hasher.prefix_hash(self._chain, self._token_ids, num_tokens, self._extra_keys)

    def block_ends(self, num_tokens: int, block_size: int) -> tuple[bytes, ...]:
        """Return the hash at the end of each block of ``block_size`` tokens; the last block may be partial.

        ``block_size`` must be a multiple of ``HASH_BLOCK_SIZE``.
        """
        assert block_size % HASH_BLOCK_SIZE == 0, "the ends of blocks are values of the chain"
        ends = range(block_size, num_tokens + block_size, block_size)
        return tuple(self.at(min(end, num_tokens)) for end in ends)


def _extra_keys(request: VllmRequest) -> RequestKeys:
    keys: list[ExtraKey] = []
    if request.lora_request is not None:
        keys.append(("lora", request.lora_request.lora_name))
    for feature in request.mm_features:
        position = feature.mm_position
        keys.append(("mm", feature.identifier.encode(), position.offset, position.length))
    if request.cache_salt:
        keys.append(("cache_salt", request.cache_salt))
    return RequestKeys(keys)
