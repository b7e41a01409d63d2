"""The blocks that each eviction policy keeps of prompts stored in several steps: the figures of docs/kvstore.md."""

import pytest

from kvstore.arena import arena_bytes
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.store_suite import get, lookup, put

NUM_SLOTS, NUM_PROMPTS, NUM_BLOCKS, STEP = 182, 16, 32, 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("lru", [NUM_BLOCKS] * NUM_PROMPTS),
        ("arc", [NUM_BLOCKS] * 5 + [2] + [NUM_BLOCKS] * 10),
        ("s3fifo", [NUM_BLOCKS] * 5 + [2] * 11),
    ],
)
def test_how_much_of_a_prompt_is_there_when_its_last_step_is_stored(embedded_store, policy, kept):
    found = []
    memory_bytes = arena_bytes(NUM_SLOTS, BLOCK_BYTES)
    with embedded_store(memory_bytes=memory_bytes, eviction=policy, max_pinned_share=1.0) as store:
        for prompt in range(NUM_PROMPTS):
            blocks = [make_block(1000 * prompt + number) for number in range(NUM_BLOCKS)]
            for start in range(0, NUM_BLOCKS, STEP):
                put(store, blocks[start : start + STEP])
            num_hits = lookup(store, [block.key for block in blocks]).num_prefix_hits
            found.append(num_hits)
            if num_hits:
                store.release(get(store, [block.key for block in blocks[:num_hits]]))
            if num_hits < NUM_BLOCKS:  # what was computed again
                put(store, blocks[num_hits:])
    assert found == kept
