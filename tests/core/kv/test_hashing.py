"""The hash chain: fixed values, independence of process and chunking, and no two meanings for one value."""

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from core.constants import HASH_BLOCK_SIZE
from core.kv.hashing import BlockHasher, RequestKeys, block_extra_keys, encode_extra_keys, hash_media
from tests.support.counted_offset import CountedOffset

ROOT = Path(__file__).resolve().parents[3]
FINGERPRINT = b"golden model fingerprint"
TOKENS = array("i", range(100, 140))
KEYS = (("lora", "adapter"), ("mm", b"image-1", 20, 30), ("cache_salt", "tenant"))
GOLDEN_PLAIN = ["a70403f8392d8e0c829d57f4536ae7e8", "5871b985f8fefd1949826463c2a38d3d"]
GOLDEN_KEYED = ["703b40345babd1d7bcb713523a139ce8", "bf9d0020c86c9d64142ca53f62168e41"]
GOLDEN_MEDIA = "506b931723129cfdaac20d5c4cdab57b"
GOLDEN_TAIL = "105ec7eb69229153603e41323f4895ad"
GOLDEN_SALTED_TAIL = "27fde4e470209fc39fd88d6caec62536"

media = st.tuples(st.just("mm"), st.binary(max_size=2), st.integers(0, 90), st.integers(0, 60))
request_keys = st.lists(st.one_of(media, st.sampled_from([("lora", "x"), ("cache_salt", "s")])), max_size=8)
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=80)
parts = st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers(-(2**63), 2**63 - 1))
key_lists = st.lists(st.lists(parts, max_size=3).map(tuple), max_size=3)


@pytest.fixture
def golden_hasher():
    return BlockHasher(FINGERPRINT)


def test_values_are_fixed_forever(golden_hasher):
    plain = golden_hasher.hash_request_blocks(TOKENS)
    assert [value.hex() for value in plain] == GOLDEN_PLAIN
    assert [value.hex() for value in golden_hasher.hash_request_blocks(TOKENS, KEYS)] == GOLDEN_KEYED
    assert hash_media(FINGERPRINT, b"size=4", b"file").hex() == GOLDEN_MEDIA
    assert golden_hasher.partial_hash(plain[-1], TOKENS[32:]).hex() == GOLDEN_TAIL
    assert golden_hasher.partial_hash(None, TOKENS[:3], (("cache_salt", "tenant"),)).hex() == GOLDEN_SALTED_TAIL


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_a_process_with_another_hash_seed_gets_the_same_values(seed):
    program = f"""
from array import array
from core.kv.hashing import BlockHasher
print(*(value.hex() for value in BlockHasher({FINGERPRINT!r}).hash_request_blocks({TOKENS!r}, {KEYS!r})))
"""
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == GOLDEN_KEYED


@given(token_lists)
def test_chain_follows_its_written_definition(token_ids):
    parent, chain = bytes(16), []
    for start in range(0, len(token_ids) - 15, 16):
        text = parent + bytes(4) + struct.pack("<16i", *token_ids[start : start + 16])
        parent = hashlib.blake2b(text, digest_size=16, key=FINGERPRINT, person=b"kvferry full v1").digest()
        chain.append(parent)
    assert BlockHasher(FINGERPRINT).hash_request_blocks(array("i", token_ids)) == chain


def test_tail_and_extra_keys_follow_their_written_definition(golden_hasher):
    extra = encode_extra_keys((("mm", "ab", -2), ("x", b"\0")))
    assert extra == (
        b"\2\0\0\0"
        + (b"\3\0\0\0" + b"s\2\0\0\0mm" + b"s\2\0\0\0ab" + b"i\x08\0\0\0\xfe" + b"\xff" * 7)
        + (b"\2\0\0\0" + b"s\1\0\0\0x" + b"b\1\0\0\0\0")
    )
    text = b"p" * 16 + struct.pack("<I", len(extra)) + extra + struct.pack("<4i", 3, 7, 8, 9)
    expected = hashlib.blake2b(text, digest_size=16, key=FINGERPRINT, person=b"kvferry tail v1").digest()
    keys = (("mm", "ab", -2), ("x", b"\0"))
    assert golden_hasher.partial_hash(b"p" * 16, array("i", [7, 8, 9]), keys) == expected


@given(token_lists, st.lists(st.integers(0, 80), max_size=4))
def test_extending_in_any_steps_gives_the_same_chain(token_ids, steps):
    hasher = BlockHasher(FINGERPRINT)
    grown = []
    for end in sorted(steps):
        hasher.extend(grown, array("i", token_ids[:end]), KEYS)
        assert len(grown) == min(end, len(token_ids)) // HASH_BLOCK_SIZE
    hasher.extend(grown, array("i", token_ids), KEYS)
    assert grown == hasher.hash_request_blocks(array("i", token_ids), KEYS)


@pytest.mark.slow
@given(token_lists, st.integers(0, 79))
def test_values_agree_exactly_up_to_the_first_different_token(token_ids, position):
    assume(position < len(token_ids))
    other = list(token_ids)
    other[position] ^= 1
    hasher = BlockHasher(FINGERPRINT)
    pairs = zip(hasher.hash_request_blocks(array("i", token_ids)), hasher.hash_request_blocks(array("i", other)), strict=True)
    assert [left == right for left, right in pairs] == [i < position // 16 for i in range(len(token_ids) // 16)]


def test_little_endian_bytes_hash_like_an_array(golden_hasher):
    as_bytes = struct.pack("<40i", *TOKENS)
    assert golden_hasher.hash_request_blocks(as_bytes) == golden_hasher.hash_request_blocks(TOKENS)
    assert golden_hasher.partial_hash(None, as_bytes[:20]) == golden_hasher.partial_hash(None, TOKENS[:5])


def test_another_model_gets_other_values(golden_hasher):
    other = BlockHasher(FINGERPRINT + b"!")
    assert not set(other.hash_request_blocks(TOKENS)) & set(golden_hasher.hash_request_blocks(TOKENS))
    assert other.partial_hash(None, TOKENS[:5]) != golden_hasher.partial_hash(None, TOKENS[:5])


@given(key_lists, key_lists)
def test_different_extra_keys_never_encode_alike(left, right):
    typed = [[[(type(part), part) for part in key] for key in keys] for keys in (left, right)]
    assert (encode_extra_keys(left) == encode_extra_keys(right)) == (typed[0] == typed[1])


def test_salt_enters_the_first_block_only():
    assert block_extra_keys((("cache_salt", "a"),), 0, 16) == (("cache_salt", "a"),)
    assert block_extra_keys((("cache_salt", "a"),), 16, 32) == ()


def test_salt_separates_every_block_of_two_tenants(golden_hasher):
    first = golden_hasher.hash_request_blocks(TOKENS, (("cache_salt", "a"),))
    second = golden_hasher.hash_request_blocks(TOKENS, (("cache_salt", "b"),))
    assert not {*first, *golden_hasher.hash_request_blocks(TOKENS)} & set(second)


def test_adapter_enters_every_block():
    assert [block_extra_keys((("lora", "x"),), start, start + 16) for start in (0, 16)] == [(("lora", "x"),)] * 2


def test_multimodal_item_enters_the_blocks_it_overlaps_relative_to_their_start():
    item = (("mm", b"image", 20, 30),)  # tokens 20..49
    keys = [block_extra_keys(item, start, start + 16) for start in (0, 16, 32, 48, 64)]
    assert keys == [(), (("mm", b"image", 4),), (("mm", b"image", -12),), (("mm", b"image", -28),), ()]


@given(token_lists, request_keys, st.integers(0, 5))
def test_media_in_any_order_enter_as_if_all_were_looked_at(token_ids, keys, num_known):
    """They may overlap each other and the ends of blocks, or be empty."""
    parent, chain = bytes(16), []
    for start in range(0, len(token_ids) - 15, 16):
        extra = encode_extra_keys(block_extra_keys(tuple(keys), start, start + 16))
        text = parent + struct.pack("<I", len(extra)) + extra + struct.pack("<16i", *token_ids[start : start + 16])
        parent = hashlib.blake2b(text, digest_size=16, key=FINGERPRINT, person=b"kvferry full v1").digest()
        chain.append(parent)
    hasher, tokens, own_keys = BlockHasher(FINGERPRINT), array("i", token_ids), RequestKeys(keys)
    grown = chain[:num_known]
    hasher.extend(grown, tokens, own_keys)
    assert grown == hasher.hash_request_blocks(tokens, keys) == chain
    tail = len(token_ids) // 16 * 16, len(token_ids)
    assert block_extra_keys(own_keys, *tail) == block_extra_keys(tuple(keys), *tail)


def test_a_prompt_of_many_images_is_hashed_with_few_looks_at_them(golden_hasher, monkeypatch):
    monkeypatch.setattr(CountedOffset, "num_looks", 0)
    keys = [("mm", b"image", CountedOffset(64 * number), 40) for number in range(64)]
    golden_hasher.hash_request_blocks(array("i", range(64 * 64)), keys)
    assert 0 < CountedOffset.num_looks <= 12 * 256, "not 64 for each of 256 blocks"


def test_multimodal_item_changes_values_from_its_first_block_on(golden_hasher):
    cat = golden_hasher.hash_request_blocks(TOKENS, (("mm", b"cat", 20, 4),))
    dog = golden_hasher.hash_request_blocks(TOKENS, (("mm", b"dog", 20, 4),))
    assert [left == right for left, right in zip(cat, dog, strict=True)] == [True, False]


def test_unknown_extra_key_is_refused(golden_hasher):
    with pytest.raises(ValueError, match="prompt_embeds"):
        golden_hasher.hash_request_blocks(TOKENS, (("prompt_embeds", "x"),))


def test_tail_is_no_full_block_even_with_the_same_bytes():
    # A full block of this hasher and a tail of the other one hash the same tokens after the same parent.
    full = BlockHasher(FINGERPRINT, hash_block_size=8).hash_request_blocks(TOKENS[:8])[0]
    assert BlockHasher(FINGERPRINT).partial_hash(None, TOKENS[:8]) != full
    # The bytes of a tail, count included, spelled as the tokens of a full block.
    spelled = array("i", [7, *TOKENS[:7]])
    assert BlockHasher(FINGERPRINT, 8).hash_request_blocks(spelled)[0] != BlockHasher(FINGERPRINT).partial_hash(
        None, TOKENS[:7]
    )


def test_tails_differ_by_length_parent_and_keys(golden_hasher):
    zeros = array("i", [0] * 15)
    parent = golden_hasher.hash_request_blocks(TOKENS)[0]
    values = {golden_hasher.partial_hash(before, zeros[:n]) for n in range(1, 16) for before in (None, parent)}
    values |= {golden_hasher.partial_hash(None, zeros[:n], (("cache_salt", "a"),)) for n in range(1, 16)}
    assert len(values) == 45


@pytest.mark.parametrize("count", [0, 16, 17])
def test_tail_of_a_wrong_length_is_refused(golden_hasher, count):
    with pytest.raises(ValueError, match="1 to 15 tokens"):
        golden_hasher.partial_hash(None, TOKENS[:count])


def test_prefix_hash_is_the_chain_at_block_ends_and_a_tail_between(golden_hasher):
    chain = golden_hasher.hash_request_blocks(TOKENS, KEYS)
    assert [golden_hasher.prefix_hash(chain, TOKENS, n, KEYS) for n in (16, 32)] == chain
    tail = golden_hasher.partial_hash(chain[0], TOKENS[16:21], block_extra_keys(KEYS, 16, 21))
    assert golden_hasher.prefix_hash(chain, TOKENS, 21, KEYS) == tail
    assert len({golden_hasher.prefix_hash(chain, TOKENS, n, KEYS) for n in range(1, 41)}) == 40


def test_prefix_hash_of_a_short_prompt_depends_on_the_salt(golden_hasher):
    values = {golden_hasher.prefix_hash([], TOKENS[:5], 5, keys) for keys in ((), (("cache_salt", "a"),))}
    assert len(values) == 2


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 2), (41, 2), (-1, 2), (33, 1)])
def test_prefix_hash_outside_the_known_sequence_is_refused(golden_hasher, num_tokens, num_hashes):
    chain = golden_hasher.hash_request_blocks(TOKENS)[:num_hashes]
    with pytest.raises(ValueError, match="no hash of"):
        golden_hasher.prefix_hash(chain, TOKENS, num_tokens)


@pytest.mark.parametrize("fingerprint", [b"", b"x" * 65])
def test_fingerprint_that_cannot_be_a_key_is_refused(fingerprint):
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        BlockHasher(fingerprint)


def test_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="positive"):
        BlockHasher(FINGERPRINT, 0)


def test_tokens_of_another_width_are_refused(golden_hasher):
    with pytest.raises(ValueError, match="4-byte"):
        golden_hasher.hash_request_blocks(array("q", TOKENS))
    with pytest.raises(ValueError, match="whole number"):
        golden_hasher.hash_request_blocks(b"abc")


def test_an_image_is_another_one_for_another_model_or_another_processing_of_it():
    parts = [(FINGERPRINT, b"ab", b"c"), (FINGERPRINT, b"a", b"bc"), (b"other", b"ab", b"c"), (FINGERPRINT, b"ab", b"d")]
    assert len({hash_media(*part) for part in parts}) == len(parts)
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        hash_media(b"", b"", b"file")
