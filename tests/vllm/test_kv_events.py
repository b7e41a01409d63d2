"""vLLM's own structs decode every batch that we publish, and encode it to the same bytes."""

import json
import random
import subprocess
from pathlib import Path

import pytest
import zmq

from core.engine.kv_events import KVEventPublisher, event_group
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from core.request import NewRequest, Request
from core.wire.kv_events import END_OF_REPLAY
from core.wire.media import MMFeature
from core.wire.sampling import SamplingParams
from tests.support.vllm_engine import CPU_ENVIRONMENT, vllm_python

pytestmark = [pytest.mark.vllm]
ROOT = Path(__file__).parents[2]
SIZES = {"block_size": 16, "num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 4}
GROUPS = (
    KVCacheGroup((0,), FullAttentionSpec(**SIZES)),
    KVCacheGroup((1,), SlidingWindowSpec(**SIZES, sliding_window=40)),
)
WAIT_MS = 20_000


def structs(mode, lines=()):
    return subprocess.run(
        [str(vllm_python()), str(ROOT / "tests/support/vllm_kv_events.py"), mode],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=CPU_ENVIRONMENT | {"PATH": "/usr/bin:/bin"},
    ).stdout


def test_golden_bytes_are_what_vllm_makes_today():
    assert json.loads(structs("golden")) == json.loads((ROOT / "tests/core/wire/golden_kv_events.json").read_text())


def replayed(address):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send_multipart([b"", bytes(8)])
    payloads = []
    while True:
        assert socket.poll(WAIT_MS), "the replay has no end"
        *_, number, payload = socket.recv_multipart()
        if number == END_OF_REPLAY:
            context.destroy(linger=0)
            return payloads
        payloads.append(payload)


def serve_random_prompts(manager, publisher, num_requests):
    """Prompts with images and salts that share prefixes, in a pool that evicts; publish after each."""
    hasher, rng = BlockHasher(b"model"), random.Random(7)
    for number in range(num_requests):
        tokens = [rng.randrange(3)] * 16 + [rng.randrange(60_000) for _ in range(rng.randrange(100))]
        image = MMFeature(identifier=b"i" * 16, offset=8, length=20, num_embeds=20, media_index=0)
        request = Request(
            NewRequest(
                request_id=f"r{number}",
                prompt_token_ids=tokens,
                sampling=SamplingParams(max_tokens=1),
                cache_salt=rng.choice(["", "tenant"]),
                mm_features=(image,) if len(tokens) > 30 and rng.random() < 0.5 else (),
            ),
            hasher,
        )
        computed, num_hit = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, len(tokens) - num_hit, num_hit, computed) is not None
        publisher.publish(manager.take_events())
        manager.free(request)
        if number % 25 == 24:
            assert manager.reset_prefix_cache()


def test_vllm_decodes_every_published_batch_and_encodes_the_same():
    manager = KVCacheManager(KVCacheConfig(40, GROUPS), 1024, 16, 16, max_in_flight_tokens=256, enable_kv_cache_events=True)
    groups = [event_group(group.spec) for group in GROUPS]
    publisher = KVEventPublisher("tcp://127.0.0.1:0", "kv@w@m", groups=groups, replay_address="tcp://127.0.0.1:0")
    serve_random_prompts(manager, publisher, 100)
    payloads = replayed(publisher.replay_address)
    publisher.close()
    decoded = [json.loads(line) for line in structs("decode", [payload.hex() for payload in payloads]).splitlines()]
    assert len(decoded) == len(payloads) > 50
    assert all(batch["is_same"] and batch["rank"] == 0 for batch in decoded)
    assert {kind for batch in decoded for kind in batch["kinds"]} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
