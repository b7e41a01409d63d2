"""The blocks of a load that are accepted: seals, digests, and the one retry of corrupt bytes."""

from __future__ import annotations

import dataclasses

import pytest

from connectors.p2p.actions import PostRead, PostSealRead, ReadEnded, TransferReport, row_units
from connectors.p2p.consumer.verification import SealCheck, SealTerms
from connectors.reports import ALL_BLOCKS
from core.errors import PeerUnreachable, ProtocolError, TransferError
from core.kv.seals import ExpectedSeal, layout_fingerprint
from tests.connectors.p2p.conftest import expected_seal, seal_row

EXPECTED = ExpectedSeal(generation=3, group_id=0, block_hash=b"h" * 16, num_tokens=32)


# ---- the check itself


@pytest.fixture
def check(layout, make_seal):
    def check(seal: bytes | None = None, digest: int | None = None, incarnation: int = 1):
        terms = SealTerms(incarnation, layout_fingerprint(layout), wants_digests=digest is not None)
        units = dict(enumerate(row_units((8,), (2,), (EXPECTED,))))
        return SealCheck(terms, units).verdict(seal or make_seal(EXPECTED), {} if digest is None else {8: digest})

    return check


def test_seal_that_says_what_is_expected_is_good(check):
    assert check().good == [0]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("generation", 4, "generation 4 instead of 3"),
        ("group_id", 1, "group_id 1 instead of 0"),
        ("block_hash", b"x" * 16, f"block_hash {(b'x' * 16).hex()} instead of {(b'h' * 16).hex()}"),
        ("num_tokens", 31, "num_tokens 31 instead of 32"),
    ],
)
def test_each_field_of_the_seal_counts_and_is_reported_with_both_values(check, make_seal, field, value, said):
    verdict = check(make_seal(dataclasses.replace(EXPECTED, **{field: value})))
    assert verdict.good == []
    assert verdict.stale[0].code == "stale"
    assert f"block 8: {said}" in verdict.stale[0].message


@pytest.mark.parametrize("seal", [bytes(64), b"\xff" * 64])
def test_row_that_is_no_seal_is_told_from_another_seal(check, seal):
    verdict = check(seal)
    assert verdict.unsealed[0].code == "stale"
    assert not verdict.stale


def test_seal_of_another_incarnation_is_stale(check, make_seal):
    assert "incarnation" in check(make_seal(EXPECTED, incarnation=2)).stale[0].message


def test_right_digest_is_good_and_a_wrong_one_is_corrupt_with_both_values(check, make_seal):
    assert check(make_seal(EXPECTED, digest=0xABC), digest=0xABC).good == [0]
    verdict = check(make_seal(EXPECTED, digest=0xABC), digest=0xDEF)
    assert verdict.good == []
    assert verdict.corrupt[0].code == "digest"
    assert f"{0xABC:016x}" in verdict.corrupt[0].message
    assert f"{0xDEF:016x}" in verdict.corrupt[0].message


def test_seal_without_a_digest_does_not_do_where_one_is_demanded(check, make_seal):
    assert check(make_seal(EXPECTED), digest=0).corrupt[0].code == "digest"


def test_digest_is_not_looked_at_where_none_is_demanded(check, make_seal):
    assert check(make_seal(EXPECTED, digest=5)).good == [0]


# ---- in a load


def test_stale_blocks_are_named_and_the_rest_is_kept(pull):
    pull.start_reading(num_rows=6)
    pull.end_read(pull.end_data_reads(), seals={502: bytes(64), 505: bytes(64)})
    ended = pull.ended["r"]
    assert (ended.error.code, ended.invalid_block_ids) == ("stale", (2, 5))
    assert "block 502" in ended.error.message
    assert (ended.usage.verified_blocks, ended.usage.transferred_tokens) == (4, 128)
    assert ended.usage.transferred_bytes == 6 * 1024
    assert len(pull.actions(PostSealRead)) == 1, "stale blocks do not get better"


def test_load_whose_blocks_are_all_stale_fails_as_a_whole(pull):
    pull.start_reading(num_rows=2)
    pull.end_read(pull.end_data_reads(), seals={500: bytes(64), 501: bytes(64)})
    ended = pull.ended["r"]
    assert (ended.error.code, ended.invalid_block_ids) == ("stale", ALL_BLOCKS)
    assert (ended.usage.verified_blocks, ended.usage.transferred_tokens) == (0, 0)


@pytest.fixture
def patient(make_pull):
    """A load of four blocks from a producer that grants leases before it seals."""
    pull = make_pull(unsealed_patience_s=0.05)
    pull.start_reading(num_rows=4)
    return pull


def test_blocks_without_a_seal_are_read_again_until_they_have_theirs(patient):
    pull = patient
    pull.end_read(pull.end_data_reads(), seals={501: bytes(64), 502: bytes(64)})
    assert not pull.open_reads, "it waits a moment"
    pull.tick(0.01)
    assert [pull.open_reads[read_id].remote_rows for read_id in pull.data_reads()] == [(501, 502)]
    pull.end_read(pull.end_data_reads(), seals={502: bytes(64)})
    pull.tick(0.01)
    pull.end_read(pull.end_data_reads())
    assert pull.ended["r"].error is None
    assert pull.usable_rows("r") == {0, 1, 2, 3}
    assert pull.ended["r"].usage.transferred_bytes == 7 * 1024


def test_blocks_that_stay_without_a_seal_are_stale_in_the_end(patient):
    pull, num_looks = patient, 0
    while "r" not in pull.ended:
        pull.end_read(pull.end_data_reads(), seals={501: bytes(64)})
        num_looks += 1
        pull.tick(0.01)
    assert (pull.ended["r"].error.code, pull.ended["r"].invalid_block_ids) == ("stale", (1,))
    assert num_looks == 6
    assert pull.usable_rows("r") == {0, 2, 3}


def test_another_seal_is_stale_at_once_however_patient_the_reader_is(patient):
    other = seal_row(dataclasses.replace(expected_seal(501), generation=9))
    patient.end_read(patient.end_data_reads(), seals={501: other})
    assert patient.ended["r"].invalid_block_ids == (1,)


@pytest.mark.parametrize("how", ["peer lost", "deadline", "abort", "lease over"])
def test_load_that_waits_for_seals_ends_as_any_other(patient, how):
    pull = patient
    pull.end_read(pull.end_data_reads(), seals={501: bytes(64)})
    match how:
        case "peer lost":
            pull.disconnect()
        case "deadline":
            pull.clock.advance(30.0)
            pull.tick()
        case "abort":
            pull.abort("r")
        case "lease over":
            pull.grant(0)
    assert "r" in pull.ended
    assert not pull.open_reads
    assert not pull.quarantined
    if how != "abort":
        assert pull.usable_rows("r") == {0, 2, 3}


def test_seals_that_came_too_early_fail_the_load_and_the_blocks_wait_for_their_reads(pull):
    pull.start_reading(num_rows=4)
    (seal_read,) = (read_id for read_id, read in pull.open_reads.items() if isinstance(read, PostSealRead))
    del pull.open_reads[seal_read]
    pull.take(pull.protocol.on_transfer(TransferReport(ReadEnded(seal_read, ProtocolError("too early")), pull.now), pull.now))
    ended = pull.ended["r"]
    assert (ended.error.code, ended.usage.verified_blocks) == ("protocol_error", 0)
    assert pull.quarantined == {0, 1, 2, 3}
    pull.end_reads()
    assert not pull.quarantined


def test_what_one_group_lacks_the_others_cannot_make_up(pull):
    pull.start_reading(num_rows=0)
    seals = [dataclasses.replace(EXPECTED, group_id=group, num_tokens=32) for group in (0, 0, 1, 1)]
    request = dataclasses.replace(
        pull.requests["r"],
        request_id="two groups",
        units=row_units((500, 501, 502, 503), (10, 11, 12, 13), seals),
        num_tokens=64,
    )
    pull.requests[request.request_id] = request
    pull.take(pull.protocol.start(request, pull.now))
    seal_read = pull.end_data_reads()
    pull.end_read(seal_read, TransferError("no seals"))
    assert pull.ended["two groups"].usage.transferred_tokens == 0


def test_block_that_two_groups_name_is_not_read(pull):
    """The digest of one copy would answer for the other."""
    pull.start_reading(num_rows=0)
    seals = [dataclasses.replace(EXPECTED, group_id=group) for group in (0, 1)]
    units = row_units((500, 500), (10, 11), seals)
    request = dataclasses.replace(pull.requests["r"], request_id="two groups", units=units, num_tokens=32)
    pull.requests[request.request_id] = request
    pull.take(pull.protocol.start(request, pull.now))
    assert pull.failed == {"two groups": "stale"}
    assert not pull.open_reads


@pytest.fixture
def digesting(make_pull):
    pull = make_pull(kv_verify="digest")
    pull.start(num_rows=4)
    pull.accept(has_digests=True)
    pull.grant()
    return pull


def test_digests_are_asked_for_and_right_ones_accepted(digesting):
    seal_read = digesting.end_data_reads()
    assert digesting.open_reads[seal_read].wants_digests
    digesting.end_read(seal_read)
    assert digesting.usable_rows("r") == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kv_verify", "transport", "demanded"),
    [
        ("identity", "tcp", False),
        ("digest", "shm", True),
        ("auto", "shm", False),
        ("auto", "tcp", True),
    ],
)
def test_what_is_verified_follows_setting_and_transport(make_pull, kv_verify, transport, demanded):
    pull = make_pull(kv_verify=kv_verify)
    pull.start(num_rows=1)
    pull.accept(transport=transport, has_digests=True)
    pull.grant()
    assert pull.open_reads[pull.end_data_reads()].wants_digests is demanded


def test_corrupt_blocks_alone_are_read_once_more_bytes_first_and_then_seals(digesting):
    pull = digesting
    pull.clock.advance(1)
    again, seals = pull.end_read(pull.end_data_reads(), digests={501: 1, 502: 2})
    assert isinstance(again, PostRead)
    assert (again.remote_rows, again.local_rows) == ((501, 502), (1, 2))
    assert isinstance(seals, PostSealRead)
    assert (seals.local_rows, seals.after) == ((1, 2), (again.read_id,))
    pull.clock.advance(1)
    pull.end_read(again.read_id)
    pull.clock.advance(1)
    pull.end_read(seals.read_id)
    ended = pull.ended["r"]
    assert ended.error is None
    assert pull.usable_rows("r") == {0, 1, 2, 3}
    assert (ended.usage.transferred_bytes, ended.usage.verified_blocks) == (6 * 1024, 4)
    assert (ended.usage.transfer_ms, ended.usage.verify_ms) == (1000, 2000)
    assert pull.protocol.counts.blocks_read_again == 2


def test_blocks_that_are_corrupt_twice_are_rejected_and_the_rest_is_kept(digesting):
    pull = digesting
    pull.end_read(pull.end_data_reads(), digests={501: 1, 502: 2})
    pull.end_read(pull.end_data_reads(), digests={502: 2})
    ended = pull.ended["r"]
    assert (ended.error.code, ended.invalid_block_ids) == ("digest", (2,))
    assert len(pull.actions(PostSealRead)) == 2


def test_block_that_turns_out_stale_when_read_again_is_stale(digesting):
    pull = digesting
    pull.end_read(pull.end_data_reads(), digests={501: 1})
    pull.end_read(pull.end_data_reads(), seals={501: bytes(64)})
    assert pull.ended["r"].error.code == "stale"
    assert pull.usable_rows("r") == {0, 2, 3}


@pytest.mark.parametrize("how", ["peer lost", "deadline", "read failed", "lease over"])
def test_what_was_verified_survives_whatever_happens_to_the_second_read(digesting, how):
    pull = digesting
    if how == "lease over":
        pull.end_data_reads()
        pull.grant(0)
        pull.end_read(max(pull.open_reads), digests={502: 2})
    else:
        again, _ = pull.end_read(pull.end_data_reads(), digests={502: 2})
    if how == "peer lost":
        pull.end_read(again.read_id, PeerUnreachable("gone"))
    elif how == "deadline":
        pull.tick(30)
    elif how == "read failed":
        pull.end_read(again.read_id, TransferError("no"))
    ended = pull.ended["r"]
    assert (
        ended.error.code
        == {
            "peer lost": "peer_lost",
            "deadline": "deadline",
            "read failed": "transfer_error",
            "lease over": "lease_expired",
        }[how]
    )
    assert ended.invalid_block_ids == (2,)
    assert pull.usable_rows("r") == {0, 1, 3}
    assert pull.quarantined == (set() if how == "lease over" else {2})
