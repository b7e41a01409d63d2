"""Clients that leave, and workers that die, freeze or come back: which requests end, and when."""

from __future__ import annotations

import numpy as np
import pytest

from connectors.p2p.actions import PullRequest, RenewHandoffs
from connectors.p2p.transport.interface import PeerId
from connectors.reports import ALL_BLOCKS, SendingEnded
from core.wire.kv import Handshake


def test_the_fault_free_case_loads_everything_and_leaves_nothing(world):
    request = world.make_handoff()
    world.load(request)
    assert world.reason() == ""
    assert world.has_content(request)
    world.tell_reader(releases=[request.handoff])
    assert world.owner.reports == [SendingEnded("r")]
    assert world.owner.agent.producer.leases.num_blocks == 0
    world.assert_quiet()


# ---- a client disconnects


@pytest.mark.parametrize("phase", ["handshake", "read", "seals"])
def test_abort_is_reported_at_once_in_every_phase_and_what_is_open_is_quarantined(world, phase):
    request = world.make_handoff()
    if phase == "handshake":
        world.freeze()
    world.load(request, settle=False)
    if phase == "seals":
        world.reader.plan.stall = {4}
        world.settle()
    world.tell_reader(aborts=["r"])
    load = world.reader.loads()["r"]
    assert (load.error, load.usage) == (None, None)
    assert (
        set(load.quarantined_block_ids)
        == {
            "handshake": set(),
            "read": set(request.local_rows),
            "seals": set(request.local_rows),
        }[phase]
    )
    world.tell_reader(releases=[request.handoff])
    if phase == "handshake":
        world.thaw()
    world.settle()
    world.assert_quiet()
    assert world.owner.agent.producer.leases.num_blocks == 0


# ---- D dies


def test_leases_of_a_reader_that_died_end_within_their_term(world):
    request = world.make_handoff()
    world.load(request)
    world.workers.remove(world.reader)
    world.wait(world.lease_s - 0.5)
    assert world.owner.agent.producer.leases.num_blocks == 6
    world.wait(0.5)
    assert world.owner.reports == [SendingEnded("r")]
    assert world.owner.agent.producer.leases.num_blocks == 0
    world.workers.append(world.reader)


# ---- P dies


@pytest.mark.parametrize("when", ["before contact", "before the read", "during the read", "before the seals"])
def test_death_of_the_owner_is_reported_at_once(world, when):
    before = world.make_handoff("before", num_blocks=1, first=1, rows=1)
    if when != "before contact":
        world.load(before)
    request = world.make_handoff()
    if when == "before contact":
        world.kill()
        world.load(request)
    elif when == "before the read":
        world.tell_reader(holds=[request.handoff])
        world.kill()
        world.load(request)
    elif when == "during the read":
        world.load(request, settle=False)
        world.kill()
    else:
        world.reader.plan.stall = {6}  # 1 and 2 were the first load's, 3 to 5 are the blocks
        world.load(request)
        world.kill()
    assert world.reason() == "peer_lost"
    assert world.reader.loads()["r"].invalid_block_ids is ALL_BLOCKS
    world.settle()
    world.assert_quiet()
    if when != "before contact":
        assert world.reason("before") == ""


def test_memory_of_a_dead_owner_is_released_at_once(world, monkeypatch):
    removed: list[PeerId] = []
    monkeypatch.setattr(world.reader.transport, "remove_peer", removed.append)
    world.load(world.make_handoff())
    world.kill()
    assert removed == [PeerId(world.address, 1)]


# ---- P freezes


def test_frozen_owner_costs_its_readers_a_deadline_and_its_late_bytes_never_land(world):
    request = world.make_handoff()
    world.load(request, settle=False)
    world.freeze()
    world.wait(world.deadline_s - 0.5)
    assert world.reader.loads() == {}
    world.wait(0.5)
    assert world.reason() == "deadline"
    assert set(world.reader.loads()["r"].quarantined_block_ids) == set(request.local_rows)
    world.assert_quiet()  # the peer was fenced
    world.reader.memory.rows[list(request.local_rows)] = 7  # owned by another request by now
    world.thaw()
    assert (world.reader.memory.rows[list(request.local_rows)] == 7).all()


def test_owner_that_thaws_is_a_peer_again(world):
    world.load(world.make_handoff("first"), settle=False)
    world.freeze()
    world.wait(world.deadline_s)
    world.thaw()
    world.wait(1.0)  # a probe finds that it can be read again
    again = world.make_handoff("again")
    world.load(again)
    assert world.reason("again") == ""
    assert world.has_content(again)


def test_owner_that_is_frozen_at_the_handshake_costs_its_timeout(world):
    request = world.make_handoff()
    world.freeze()
    world.load(request)
    world.wait(5.0)
    assert world.reason() == "peer_lost"
    world.assert_quiet()


def test_quarantine_ends_with_the_read_where_the_peer_need_not_be_fenced(world):
    request = world.make_handoff()
    world.load(request, settle=False)
    world.freeze()
    world.wait(1.0)
    world.tell_reader(aborts=["r"])
    assert world.reader.agent.consumer.num_quarantined_blocks == 6
    world.thaw()  # the bytes land, in blocks that no request has
    world.assert_quiet()
    assert np.array_equal(world.reader.memory.rows[20], world.owner.memory.rows[4])


# ---- P restarts


def test_restarted_owner_is_a_new_peer_with_one_handshake_for_all_loads(world):
    old = world.make_handoff("old")
    world.load(old, settle=False)
    world.kill()
    assert world.reason("old") == "peer_lost"
    world.restart()
    world.sent.clear()
    outdated = world.make_handoff("outdated", first=1, num_blocks=1, rows=1)
    outdated = PullRequest("outdated", old.handoff, outdated.units, outdated.num_tokens)
    new = [world.make_handoff(f"new {index}", first=8 + 4 * index, num_blocks=4, rows=8 + 4 * index) for index in range(3)]
    world.tell_reader(pulls=[outdated, *new])
    world.settle()
    assert world.reason("outdated") == "stale"
    for request in new:
        assert world.reason(request.request_id) == ""
        assert world.has_content(request)
    assert len([message for message in world.sent if isinstance(message, Handshake)]) == 1
    world.assert_quiet()


def test_handoff_of_an_earlier_incarnation_is_stale_though_the_blocks_look_right(world):
    """The new incarnation has the same content at the same place and grants the same lease: only its number differs."""
    request = world.make_handoff()
    world.kill()
    world.restart()
    world.make_handoff()
    world.load(request)
    assert world.reason() == "stale"
    world.assert_quiet()


# ---- the router dies


def test_lease_that_the_router_kept_alive_ends_when_it_does_not_any_more(world):
    request = world.make_handoff()
    for _ in range(3):
        world.wait(world.lease_s - 1)
        world.take_in(world.owner, RenewHandoffs([request.handoff.transfer_id]))
    assert world.owner.agent.producer.leases.num_blocks == 6
    world.wait(world.lease_s)
    assert world.owner.reports == [SendingEnded("r")]


def test_no_renewal_goes_beyond_the_cap(world):
    request = world.make_handoff()
    world.tell_reader(holds=[request.handoff])
    world.wait(59.0)
    assert world.owner.agent.producer.leases.num_blocks == 6
    world.wait(1.0)
    assert world.owner.agent.producer.leases.num_blocks == 0
