"""Blocks that are not the expected ones: leases are over, blocks were reused, owners do not fit, bytes are wrong."""

from __future__ import annotations

import msgspec
import pytest

from connectors.p2p.producer.handshake import HandshakeResponder
from connectors.reports import ALL_BLOCKS, SendingEnded
from core.wire.kv import Handshake

# ---- leases and reuse


def test_lease_that_is_over_is_stale_before_anything_is_read(world):
    request = world.make_handoff()
    world.wait(world.lease_s)
    world.load(request)
    assert world.reason() == "stale"
    assert not world.reader.memory.rows.any()
    world.assert_quiet()


def test_blocks_that_were_reused_are_stale_by_their_seals_whatever_the_lease_says(world):
    request = world.make_handoff()
    for row in request.remote_rows:
        world.owner.write(row, content=50, generation=2)
    world.load(request)
    assert world.reason() == "stale"
    assert world.reader.loads()["r"].invalid_block_ids is ALL_BLOCKS


def test_reused_block_is_stale_even_with_the_same_content(world):
    request = world.make_handoff()
    world.owner.write(request.remote_rows[2], content=100 + request.remote_rows[2], generation=2)
    world.load(request)
    assert world.reason() == "stale"
    assert world.reader.loads()["r"].invalid_block_ids == (request.local_rows[2],)


def test_block_that_is_being_rewritten_is_stale_and_the_others_are_kept(world):
    request = world.make_handoff()
    world.owner.seals.break_seals(request.remote_rows[3:])
    world.load(request)
    load = world.reader.loads()["r"]
    assert world.reason() == "stale"
    assert load.invalid_block_ids == request.local_rows[3:]
    assert load.usage.verified_blocks == 3


def test_owner_that_thaws_after_its_lease_and_reuses_the_blocks_is_stale(world):
    """The reads were in flight when the owner froze; they end with the bytes of another prompt."""
    request = world.make_handoff()
    world.load(request, settle=False)
    world.freeze()
    world.wait(world.lease_s + 1)
    for row in request.remote_rows:
        world.owner.write(row, content=50, generation=2)
    world.thaw()
    assert world.owner.reports == [SendingEnded("r")]
    assert world.reason() == "stale"
    world.assert_quiet()


def test_lease_that_ended_with_the_blocks_untouched_is_no_failure(world):
    request = world.make_handoff()
    world.load(request, settle=False)
    world.freeze()
    world.wait(world.lease_s + 1)
    world.thaw()
    assert world.owner.agent.producer.leases.num_blocks == 0
    assert world.reason() == ""
    assert world.has_content(request)


# ---- mismatches


@pytest.mark.parametrize("wrong", ["model", "layout", "digests"])
def test_owner_that_does_not_fit_is_refused_with_both_values(world, make_identity, layout, wrong):
    changed = {
        "model": {"model_fingerprint": b"\xab\xcd"},
        "layout": {"layout": msgspec.structs.replace(layout, dtype="bfloat16")},
        "digests": {},
    }[wrong]
    world.kill()
    owner = world.restart(**changed)
    if wrong == "digests":
        owner.agent.producer.responder = HandshakeResponder(
            owner.identity, world.num_blocks, {"inproc": owner.transport.describe()}
        )
        world.reader = world.add("decode-1", 98, kv_verify="digest")
    request = world.make_handoff()
    world.load(request)
    message = world.reader.loads()["r"].error.message
    assert world.reason() == ("rejected" if wrong == "digests" else "layout")
    for value in {
        "model": (b"\xab\xcd".hex(), b"model".hex()),
        "layout": ("dtype float32 at the peer", "bfloat16 at prefill-0"),
        "digests": ("kv_verify = digest", "have none"),
    }[wrong]:
        assert value in message
    world.assert_quiet()


def test_transport_that_opens_no_peer_costs_no_load(world):
    world.reader = world.add("decode-1", 98, transports=("denied", "inproc"))
    for name in ("first", "second"):
        request = world.make_handoff(name)
        world.load(request)
        assert world.reason(name) == ""
        assert world.has_content(request)
        assert world.reader.loads()[name].usage.transport == "inproc"
    assert world.reader.agent.consumer.peers.transports_in_use() == {"inproc"}
    assert [message.transports for message in world.sent if isinstance(message, Handshake)] == [
        ("denied", "inproc"),
        ("inproc",),
    ]


def test_reader_whose_only_transport_opens_no_peer_gives_the_reason(world):
    world.reader = world.add("decode-1", 98, transports=("denied",))
    world.load(world.make_handoff())
    assert world.reason() == "peer_lost"
    assert "permission denied" in world.reader.loads()["r"].error.message
    world.assert_quiet()


# ---- corrupted bytes


@pytest.fixture
def digesting(world):
    world.reader = world.add("decode-1", 98, kv_verify="digest")
    return world


def test_bytes_that_were_corrupted_once_are_read_again_and_served(digesting):
    request = digesting.make_handoff()
    digesting.reader.plan.corrupt = {2}
    digesting.load(request)
    assert digesting.reason() == ""
    assert digesting.has_content(request)
    assert digesting.reader.agent.counts()["blocks_read_again"] == 1


def test_blocks_that_are_corrupted_twice_are_rejected_alone(digesting):
    request = digesting.make_handoff()
    digesting.reader.plan.corrupt = {2, 5}  # 1 to 3 are the blocks, 4 the seals, 5 is the second time
    digesting.load(request)
    assert digesting.reason() == "digest"
    assert digesting.reader.loads()["r"].invalid_block_ids == (request.local_rows[2],)


def test_corrupted_seal_is_no_proof(digesting):
    request = digesting.make_handoff()
    digesting.reader.plan.corrupt = {4}
    digesting.load(request)
    assert digesting.reason() == "stale"
    assert digesting.reader.loads()["r"].invalid_block_ids == (request.local_rows[0],)
