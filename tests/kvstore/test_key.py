"""Store keys: what they hold, and that nothing of it gets lost or mixed up."""

import msgspec
import pytest

from core.errors import ProtocolError
from core.kv.seals import layout_fingerprint
from core.wire.kv import KVLayoutInfo
from kvstore.key import PACKED_KEY_BYTES, StoreKey, layout_key, pack_keys, split_keys

LAYOUT = KVLayoutInfo(
    dtype="float32", order="HND", block_size=16, num_layers=2, num_kv_heads=3, head_dim=8, block_bytes=2 * 2 * 3 * 8 * 16 * 4
)


def test_packing_keeps_every_part():
    key = StoreKey(bytes(range(16)), layout_key(LAYOUT), 5)
    assert len(key.pack()) == PACKED_KEY_BYTES
    assert StoreKey.unpack(key.pack()) == key


def test_several_keys_come_apart_again():
    keys = [StoreKey(bytes([number] * 16), layout_key(LAYOUT), number) for number in range(4)]
    assert split_keys(pack_keys(keys)) == [key.pack() for key in keys]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bfloat16"},
        {"order": "NHD"},
        {"block_size": 32},
        {"num_layers": 1},
        {"num_kv_heads": 1},
        {"num_groups": 2},
    ],
)
def test_another_layout_is_another_key(other):
    assert layout_key(msgspec.structs.replace(LAYOUT, **other)) != layout_key(LAYOUT)


def test_key_knows_what_its_seals_say_of_the_layout():
    assert StoreKey(bytes(16), layout_key(LAYOUT), 0).layout_version == layout_fingerprint(LAYOUT)


@pytest.mark.parametrize("packed", [b"", bytes(35), bytes(37), bytes(32) + (1 << 16).to_bytes(4, "little")])
def test_what_is_no_key_is_refused(packed):
    with pytest.raises(ProtocolError):
        StoreKey.unpack(packed)


def test_half_a_key_too_many_is_refused():
    with pytest.raises(ProtocolError):
        split_keys(bytes(PACKED_KEY_BYTES + 1))
