"""A prompt's keys are the names that a worker's own pool gives its blocks."""

import pytest

from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from core.request import NewRequest, Request, extra_keys_of
from core.wire.media import MMFeature
from core.wire.sampling import SamplingParams
from router.contents.keys import hash_keys
from tests.support.prompt_keys import prompt_keys

HASHER = BlockHasher(b"model")
IMAGE = MMFeature(identifier=b"i" * 16, offset=70, length=20, num_embeds=20, media_index=0)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(("salt", "images"), [("", ()), ("tenant", ()), ("", (IMAGE,)), ("tenant", (IMAGE,))])
def test_keys_are_those_of_the_worker_s_pool(block_size, salt, images):
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype_bytes=4)
    config = KVCacheConfig(40, (KVCacheGroup((0,), spec),))
    manager = KVCacheManager(config, 1024, block_size, 16, max_in_flight_tokens=256, enable_kv_cache_events=True)
    tokens = list(range(200))
    sampling = SamplingParams(max_tokens=1)
    new = NewRequest(request_id="r", prompt_token_ids=tokens, sampling=sampling, cache_salt=salt, mm_features=images)
    assert manager.allocate_slots(Request(new, HASHER), len(tokens)) is not None
    (stored,) = manager.take_events()
    keys = prompt_keys(HASHER, tokens, extra_keys_of(images, salt), block_size)
    assert keys == hash_keys(stored.block_hashes)
    assert len(keys) == len(tokens) // block_size


def test_the_last_token_is_in_no_key():
    assert len(prompt_keys(HASHER, range(32))) == 1
    assert len(prompt_keys(HASHER, range(33))) == 2


def test_salts_have_no_key_in_common():
    first = prompt_keys(HASHER, range(100), extra_keys_of((), "a"))
    second = prompt_keys(HASHER, range(100), extra_keys_of((), "b"))
    assert not set(first) & set(second)
