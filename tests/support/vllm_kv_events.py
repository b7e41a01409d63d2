"""The structs of vLLM's KV events at work, in vLLM's own environment: write golden bytes, or decode what was published.

Run it with that environment's interpreter (``make install-vllm``):

    python tests/support/vllm_kv_events.py golden > tests/core/wire/golden_kv_events.json
    python tests/support/vllm_kv_events.py decode     # lines of hex on stdin, one JSON per line on stdout

It imports no package of ours.
"""

import json
import sys

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

A, B, C = bytes(16), bytes(15) + b"b", bytes(15) + b"c"
GROUP = {"lora_id": None, "medium": "GPU"}
BATCHES = {
    "stored": [
        BlockStored(
            block_hashes=[A, B],
            parent_block_hash=None,
            token_ids=list(range(32)),
            block_size=16,
            lora_name=None,
            extra_keys=[None, None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            **GROUP,
        )
    ],
    "window": [
        BlockStored(
            block_hashes=[C],
            parent_block_hash=B,
            token_ids=[70000] * 16,
            block_size=16,
            lora_name=None,
            extra_keys=[None],
            group_idx=1,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=512,
            **GROUP,
        )
    ],
    "extra_keys": [
        BlockStored(
            block_hashes=[A, B, C],
            parent_block_hash=None,
            token_ids=list(range(48)),
            block_size=16,
            lora_name="french",
            extra_keys=[("french", ("ab" * 16, 4), "tenant"), ("french", ("ab" * 16, -12)), ("french",)],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            **GROUP,
        )
    ],
    "removed": [BlockRemoved(block_hashes=[A], medium="GPU", group_idx=1), AllBlocksCleared()],
}


def golden() -> None:
    """Print the bytes of every batch, as JSON."""
    encoder = msgspec.msgpack.Encoder()
    batches = {name: KVEventBatch(ts=12.5, events=events, data_parallel_rank=0) for name, events in BATCHES.items()}
    sys.stdout.write(json.dumps({name: encoder.encode(batch).hex() for name, batch in batches.items()}, indent=2) + "\n")


def decode() -> None:
    """Decode each batch strictly, encode it again, and print its events."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    for line in sys.stdin:
        payload = bytes.fromhex(line)
        batch = decoder.decode(payload)
        kinds = [type(event).__name__ for event in batch.events]
        is_same = msgspec.msgpack.encode(batch) == payload
        sys.stdout.write(json.dumps({"kinds": kinds, "rank": batch.data_parallel_rank, "is_same": is_same}) + "\n")


if __name__ == "__main__":
    {"golden": golden, "decode": decode}[sys.argv[1]]()
