from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity
from core.errors import ContextTooLong, EngineDead, NoWorker, Overloaded
from core.wire.kv import Handshake, HandshakeRefused, HandshakeReply, KVLayoutInfo
from core.wire.messages import ErrorInfo, Register
from router.dispatch import policy
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import (
    Demand,
    choose_decode,
    choose_route,
    choose_successor,
    choose_weights,
    longest_model_len,
    max_model_len,
    mismatch,
    routes,
    unpaired,
    why_not_read,
    why_not_ready,
)

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)


def member(
    role: str, engine_id: str, *, load: int = 0, is_draining: bool = False, last_picked: int = 0, **facts
) -> GenerationWorker:
    register = Register(
        engine_id=engine_id,
        incarnation=1,
        role=role,
        model="tiny",
        model_fingerprint=b"w",
        layout=LAYOUT,
        max_model_len=100,
        max_num_seqs=10,
        num_blocks=10,
        connector="p2p",
        transports=("shm", "tcp"),
        host_id="host",
        has_digests=True,
    )
    return GenerationWorker(
        key=WorkerKey(engine_id, 1),
        peer=engine_id.encode(),
        facts=msgspec.structs.replace(register, **facts),
        last_seen=0.0,
        is_draining=is_draining,
        num_inflight=load,
        last_picked=last_picked,
    )


def futures(workers: Sequence[GenerationWorker], absent: Sequence[GenerationWorker]) -> Iterator[list[GenerationWorker]]:
    """Yield which workers may soon be open: those that are, and up to two of the others, as a route needs no more."""
    closed = [worker for worker in workers if worker.is_closed]
    others = [replace(worker, is_draining=False) for worker in [*closed, *absent]]
    for returned in chain.from_iterable(combinations(others, count) for count in range(3)):
        yield [*(worker for worker in workers if not worker.is_closed), *returned]


def names(route) -> list[str]:
    return [worker.key.engine_id for worker in route.workers]


def test_picks_the_least_loaded_of_each_role():
    workers = [
        member("prefill", "p0", load=2),
        member("prefill", "p1", load=1),
        member("decode", "d0", load=1),
        member("decode", "d1", load=3),
    ]
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["p1", "d0"]


def test_a_prefill_worker_full_of_leases_comes_after_one_with_room():
    leased, busy = member("prefill", "p0"), member("prefill", "p1", load=3)
    workers = [leased, busy, member("decode", "d0")]
    leased.num_leased_blocks = 8  # of 10 blocks of 64 tokens
    assert names(choose_route(workers, Demand(num_tokens=90, num_prompt_tokens=65))) == ["p0", "d0"]
    leased.num_leased_blocks = 9
    assert names(choose_route(workers, Demand(num_tokens=90, num_prompt_tokens=65))) == ["p1", "d0"]
    busy.num_leased_blocks = 9
    assert names(choose_route(workers, Demand(num_tokens=90, num_prompt_tokens=65))) == ["p0", "d0"]


def test_of_equals_picks_the_one_longest_not_picked():
    workers = [
        member("prefill", "p0", last_picked=5),
        member("prefill", "p1", last_picked=3),
        member("decode", "d0", last_picked=4),
        member("decode", "d1", last_picked=6),
    ]
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["p1", "d0"]


def test_counts_load_per_slot():
    workers = [member("aggregated", "small", load=2, max_num_seqs=2), member("aggregated", "big", load=3, max_num_seqs=30)]
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["big"]


def test_the_heartbeat_s_load_counts_where_it_is_higher_than_ours():
    busy, idle = member("aggregated", "a0"), member("aggregated", "a1", load=1)
    busy.num_waiting = 5
    assert names(choose_route([busy, idle], Demand(num_tokens=10))) == ["a1"]


def test_a_pair_wins_over_an_equally_loaded_aggregated_worker():
    workers = [member("aggregated", "a0"), member("prefill", "p0"), member("decode", "d0")]
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["p0", "d0"]


def test_an_idle_aggregated_worker_wins_over_a_pair_with_a_full_half():
    workers = [member("aggregated", "a0", load=1), member("prefill", "p0"), member("decode", "d0", load=9)]
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["a0"]


@pytest.mark.parametrize(("alone_ms", "chosen"), [(90.0, ["a0"]), (110.0, ["p0", "d0"])])
def test_a_pair_and_an_aggregated_worker_compete_by_cost(alone_ms, chosen):
    alone, prefill = member("aggregated", "a0", load=5 if alone_ms < 100 else 0), member("prefill", "p0")
    costs = {alone.key: alone_ms, prefill.key: 100.0}
    assert names(choose_route([alone, prefill, member("decode", "d0")], Demand(num_tokens=10, costs=costs))) == chosen


def with_blocks_of(block_size: int) -> KVLayoutInfo:
    block_bytes = LAYOUT.block_bytes * block_size // LAYOUT.block_size
    return msgspec.structs.replace(LAYOUT, block_size=block_size, block_bytes=block_bytes)


def test_workers_with_other_block_sizes_are_paired_if_a_connector_converts():
    prefill, decode = member("prefill", "p0"), member("decode", "d0", layout=with_blocks_of(16))
    assert names(choose_route([prefill, decode], Demand(num_tokens=10))) == ["p0", "d0"]
    plain = {"connector": "other", "transports": ()}
    sides = [member("prefill", "p0", **plain), member("decode", "d0", **plain, layout=with_blocks_of(16))]
    with pytest.raises(NoWorker, match="block_size 16 at the peer, 64 at p0"):
        choose_route(sides, Demand(num_tokens=10))


@pytest.mark.parametrize(
    "layout",
    [with_blocks_of(40), msgspec.structs.replace(LAYOUT, block_size=16)],
    ids=["ends between two hashes", "other bytes for a token"],
)
def test_blocks_that_cannot_be_converted_are_refused(layout):
    with pytest.raises(NoWorker, match="block_size"):
        choose_route([member("prefill", "p0"), member("decode", "d0", layout=layout)], Demand(num_tokens=10))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"model_fingerprint": b"other"}, ["model", b"w".hex(), b"other".hex()]),
        ({"layout": msgspec.structs.replace(LAYOUT, dtype="bfloat16")}, ["float32", "bfloat16"]),
        ({"connector": "lmcache"}, ["'p2p'", "'lmcache'"]),
        ({"transports": ("nixl",)}, ["['shm', 'tcp']", "['nixl']"]),
        ({"transports": ("shm",), "host_id": "another"}, ["['shm', 'tcp']", "['shm']", "different hosts"]),
    ],
)
def test_incompatible_workers_are_never_paired_and_the_reason_names_both_values(facts, said):
    prefill, decode = member("prefill", "p0"), member("decode", "d0", **facts)
    reason = mismatch(prefill, decode)
    assert reason is not None
    assert all(part in reason.message for part in ["p0", "d0", *said])
    with pytest.raises(NoWorker) as refused:
        choose_route([prefill, decode], Demand(num_tokens=10))
    assert refused.value.message == reason.message


def test_a_reader_that_demands_digests_is_not_paired_with_an_owner_that_makes_none():
    prefill, decode = member("prefill", "p0", has_digests=False), member("decode", "d0", kv_verify="digest")
    with pytest.raises(NoWorker, match=r"p0 and decode d0 .*kv_verify = digest over shm.* the owner's seals have none"):
        choose_route([prefill, decode], Demand(num_tokens=10))
    assert names(choose_route([prefill, decode, member("prefill", "p1", load=5)], Demand(num_tokens=10))) == ["p1", "d0"]


SIDES = {
    "transports": [("shm",), ("tcp", "shm"), ("nixl",), ()],
    "host_id": ["host", "another"],
    "kv_verify": ["auto", "identity", "digest"],
    "has_digests": [False, True],
    "model_fingerprint": [b"w", b"other"],
    "layout": [LAYOUT, msgspec.structs.replace(LAYOUT, dtype="bfloat16"), with_blocks_of(16)],
}


@given(*2 * [st.fixed_dictionaries({name: st.sampled_from(values) for name, values in SIDES.items()})])
def test_two_workers_are_paired_exactly_if_their_handshake_would_succeed(owner, reader):
    prefill, decode = member("prefill", "p0", **owner), member("decode", "d0", **reader)
    facts = ("engine_id", "incarnation", "model_fingerprint", "layout")
    identity = WorkerIdentity(**{name: getattr(prefill.facts, name) for name in facts}, host_id=prefill.facts.host_id)
    offers = dict.fromkeys(owner["transports"], b"")
    question = {name: getattr(decode.facts, name) for name in (*facts, "transports", "host_id", "kv_verify")}
    answer = HandshakeResponder(identity, 10, offers, owner["has_digests"]).answer(Handshake(**question))
    reason = mismatch(prefill, decode)
    if owner["transports"] or reader["transports"]:
        assert (reason is None) == isinstance(answer, HandshakeReply)
        if reason is not None and isinstance(answer, HandshakeRefused):
            assert answer.message.startswith(reason.message.partition("cannot hand over: ")[2])


def test_a_request_for_certain_weights_goes_only_to_workers_that_have_them():
    workers = [
        member("prefill", "p0", model_fingerprint=b"new"),
        member("decode", "d0", model_fingerprint=b"new"),
        member("aggregated", "a0", model_fingerprint=b"new"),
        member("prefill", "p1", load=5),
        member("decode", "d1", load=5),
    ]
    demand = Demand(num_tokens=10, model_fingerprint=b"w")
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["p0", "d0"]
    assert names(choose_route(workers, demand)) == ["p1", "d1"]
    assert choose_decode(workers, workers[3], demand).key.engine_id == "d1"
    with pytest.raises(NoWorker, match=f"no worker with model {b'w'.hex()}"):
        choose_route(workers[:3], demand)
    with pytest.raises(ContextTooLong, match="holds 100"):
        choose_route(workers, Demand(num_tokens=101, model_fingerprint=b"w"))


def test_images_are_hashed_for_the_weights_of_the_least_loaded_open_route():
    old = [member("prefill", "p0", load=1), member("decode", "d0")]
    new = [member("prefill", "p1", model_fingerprint=b"new"), member("decode", "d1", load=2, model_fingerprint=b"new")]
    assert choose_weights([*new, *old]) == b"w"
    assert choose_weights([*old[:1], *new]) == b"new"
    draining = member("aggregated", "a0", model_fingerprint=b"older", is_draining=True)
    assert choose_weights([draining, *old, *new]) == b"w"
    with pytest.raises(NoWorker, match="no worker has registered"):
        choose_weights([])


def test_a_prefill_worker_without_a_partner_is_passed_over():
    workers = [
        member("prefill", "old", model_fingerprint=b"v1"),
        member("prefill", "new", load=5),
        member("decode", "d0"),
    ]
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["new", "d0"]


def test_draining_workers_get_nothing_new():
    workers = [
        member("prefill", "p0", is_draining=True),
        member("prefill", "p1", load=9),
        member("decode", "d0", is_draining=True),
        member("decode", "d1", load=9),
    ]
    assert names(choose_route(workers, Demand(num_tokens=10))) == ["p1", "d1"]


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], "no worker has registered"),
        ([member("prefill", "p0")], "no decode worker"),
        ([member("decode", "d0")], "no prefill worker"),
        ([member("aggregated", "a0", is_draining=True)], "all workers are draining"),
        ([member("prefill", "p0"), member("decode", "d0", is_draining=True)], "no decode worker"),
    ],
)
def test_says_what_is_missing(workers, reason):
    assert reason in (why_not_ready(workers) or "")
    with pytest.raises(NoWorker, match=reason):
        choose_route(workers, Demand(num_tokens=10))


def test_not_ready_reason_names_why_workers_of_the_missing_role_are_closed():
    prefill, other = member("prefill", "p0"), member("prefill", "p1")
    other.note_failure(ErrorInfo.of(EngineDead("it died")))
    assert why_not_ready([other, prefill]) == "no decode worker is available, and no aggregated one"
    assert why_not_ready([other, member("decode", "d0")]) == "no prefill worker is available, and no aggregated one: it died"
    assert why_not_ready([other, member("decode", "d0", is_draining=True)]) == "no worker takes requests: it died"


def test_is_ready_with_a_pair_or_an_aggregated_worker():
    assert why_not_ready([member("prefill", "p0"), member("decode", "d0")]) is None
    assert why_not_ready([member("aggregated", "a0")]) is None


def test_the_smaller_half_bounds_a_pair_s_context():
    workers = [member("prefill", "p0", max_model_len=300), member("decode", "d0", max_model_len=200)]
    assert max_model_len(workers) == 200
    assert names(choose_route(workers, Demand(num_tokens=200))) == ["p0", "d0"]
    with pytest.raises(ContextTooLong, match="201"):
        choose_route(workers, Demand(num_tokens=201))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prefill", "decode", "aggregated"]),
            st.sampled_from([50, 100, 200]),
            st.sampled_from([b"v1", b"v2"]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=6,
    ),
    st.integers(0, 6),
)
def test_the_longest_context_is_that_of_the_best_route(given, num_present):
    workers = [
        member(role, f"w{number}", max_model_len=length, model_fingerprint=weights, is_draining=is_draining)
        for number, (role, length, weights, is_draining, _) in enumerate(given)
    ]
    for worker, (*_, may_serve_alone) in zip(workers, given, strict=True):
        worker.may_serve_alone = may_serve_alone and worker.role == "decode"
    present, absent = workers[:num_present], workers[num_present:]
    served = max((route.max_model_len for route in routes(present)), default=0)
    assert max_model_len(present) == served
    later = [route.max_model_len for some in futures(present, absent) for route in routes(some)]
    assert longest_model_len(present, absent) == max(later, default=0)


def test_full_workers_that_are_alike_are_refused_after_few_comparisons(monkeypatch):
    names = [(role, f"{role}{number}") for role in ("prefill", "decode") for number in range(8)]
    workers = [member(*name, max_num_choices=2, load=2) for name in names]
    compared = []
    monkeypatch.setattr(policy, "_mismatch", lambda *pair: compared.append(pair))
    with pytest.raises(Overloaded):
        choose_route(workers, Demand(num_tokens=10, num_choices=2))
    assert len(compared) < 8


def test_the_longest_context_of_like_workers_is_found_at_the_first_pair(monkeypatch):
    workers = [member(role, f"{role}{number}") for role in ("prefill", "decode") for number in range(8)]
    compared = []
    monkeypatch.setattr(policy, "_mismatch", lambda *pair: compared.append(pair))
    assert (max_model_len(workers), longest_model_len(workers[1:], workers[:1])) == (100, 100)
    assert len(compared) == 2


def test_a_long_request_goes_where_it_fits_even_if_that_is_fuller():
    workers = [member("aggregated", "small", max_model_len=100), member("aggregated", "big", max_model_len=1000, load=9)]
    assert names(choose_route(workers, Demand(num_tokens=500))) == ["big"]


def test_a_successor_decode_worker_must_fit_and_suit_the_prefill_worker():
    prefill = member("prefill", "p0")
    workers = [
        prefill,
        member("decode", "other-model", model_fingerprint=b"v2"),
        member("decode", "draining", is_draining=True),
        member("decode", "small", max_model_len=10),
        member("decode", "good", load=5),
    ]
    assert choose_decode(workers, prefill, Demand(num_tokens=50)).key.engine_id == "good"
    with pytest.raises(NoWorker, match="p0"):
        choose_decode(workers[:-1], prefill, Demand(num_tokens=50))


def test_a_decode_worker_that_does_not_fit_is_refused_with_both_values():
    workers = [prefill := member("prefill", "p0"), member("decode", "d0", model_fingerprint=b"v2")]
    with pytest.raises(NoWorker, match=f"{b'v2'.hex()} at the peer, {b'w'.hex()} at p0"):
        choose_decode(workers, prefill, Demand(num_tokens=50))


def test_a_full_worker_is_not_chosen_and_all_full_is_overload():
    workers = [
        prefill := member("prefill", "p0"),
        member("decode", "full", load=8, max_num_choices=10),
        member("decode", "loaded", load=99, max_num_choices=200),
    ]
    assert names(choose_route(workers, Demand(num_tokens=1, num_choices=3))) == ["p0", "loaded"]
    assert names(choose_route(workers, Demand(num_tokens=1, num_choices=2))) == ["p0", "full"]
    assert choose_decode(workers, prefill, Demand(num_tokens=1, num_choices=3)).key.engine_id == "loaded"
    for choose in (
        lambda demand: choose_route(workers[:2], demand),
        lambda demand: choose_decode(workers[:2], prefill, demand),
        lambda demand: choose_successor(workers[:2], b"w", demand),
    ):
        with pytest.raises(Overloaded):
            choose(Demand(num_tokens=1, num_choices=3))


def test_a_worker_that_does_not_say_its_limit_has_room_until_it_refuses():
    workers = [member("aggregated", "a0", load=10**6)]
    assert names(choose_route(workers, Demand(num_tokens=1))) == ["a0"]
    workers[0].is_refusing = True
    with pytest.raises(Overloaded):
        choose_route(workers, Demand(num_tokens=1))


def test_workers_that_failed_the_request_are_the_last_resort():
    workers = [member("prefill", "p0"), member("decode", "d0"), member("decode", "d1", load=9)]
    once = Demand(num_tokens=1, avoid=frozenset({WorkerKey("d0", 1)}))
    assert names(choose_route(workers, once)) == ["p0", "d1"]
    assert choose_decode(workers, workers[0], once).key.engine_id == "d1"
    twice = Demand(num_tokens=1, avoid=frozenset({WorkerKey("d0", 1), WorkerKey("d1", 1)}))
    assert names(choose_route(workers, twice)) == ["p0", "d0"]


def test_successor_has_the_same_model_in_any_layout_and_is_no_prefill_worker():
    workers = [
        member("prefill", "p0"),
        member("decode", "other-model", model_fingerprint=b"v2"),
        member("decode", "busy", load=5),
        member("aggregated", "alone", load=4, connector=""),
        member("decode", "small", max_model_len=10),
    ]
    assert choose_successor(workers, b"w", Demand(num_tokens=50)).key.engine_id == "alone"
    with pytest.raises(NoWorker, match=b"v3".hex()):
        choose_successor(workers, b"v3", Demand(num_tokens=50))


def test_unpaired_names_workers_without_a_partner_and_why():
    v1 = [member("prefill", "p1"), member("decode", "d1")]
    v2 = [member("prefill", "p2", model_fingerprint=b"v2"), member("decode", "d2", model_fingerprint=b"v2")]
    assert unpaired(v1 + v2) == {}
    found = unpaired([*v1, v2[0]])
    assert found.keys() == {WorkerKey("p2", 1)}
    assert all(part in found[WorkerKey("p2", 1)] for part in ("p2", "d1", b"v2".hex(), b"w".hex()))
    assert unpaired([v1[0], v2[1]]).keys() == {WorkerKey("p1", 1), WorkerKey("d2", 1)}


def test_a_worker_that_lacks_a_partner_altogether_or_drains_is_not_called_unpaired():
    assert unpaired([member("prefill", "p0"), member("aggregated", "a0", model_fingerprint=b"v2")]) == {}
    draining = member("decode", "d0", model_fingerprint=b"v2", is_draining=True)
    assert unpaired([member("prefill", "p0"), draining]) == {}
    dead = member("decode", "d0", model_fingerprint=b"v2")
    dead.note_failure(ErrorInfo.of(EngineDead("it died")))
    assert unpaired([member("prefill", "p0"), dead]) == {}


# ---- workers that have changed their role ------------------------------------------------------------------------------


def test_a_worker_does_not_read_its_own_kv_after_a_switch():
    holder = member("decode", "w0", can_switch_role=True, num_switches=1)
    reader = member("decode", "d0", load=5)
    assert choose_decode([holder, reader], holder, Demand(num_tokens=10)) is reader
    with pytest.raises(NoWorker):
        choose_decode([holder], holder, Demand(num_tokens=10))
    assert why_not_read(holder, holder).code == "connector_unavailable"


def test_a_worker_that_has_become_a_prefill_worker_does_not_serve_alone():
    switched = member("prefill", "w0", kv_verify="digest", has_digests=False)  # it could not even read from one like itself
    switched.may_serve_alone = True  # as a decode worker
    with pytest.raises(NoWorker, match="no decode worker"):
        choose_route([switched], Demand(num_tokens=10))
    assert next(routes([switched]), None) is None


def test_a_reader_that_has_become_a_prefill_worker_still_reads():
    holder, reader = member("prefill", "p0"), member("prefill", "w0", can_switch_role=True, num_switches=1)
    assert why_not_read(holder, reader) is None
    assert why_not_read(holder, member("prefill", "p1")) is not None


def test_a_prefill_worker_that_can_switch_continues_a_request_if_no_other_can():
    able, other = member("prefill", "w0", can_switch_role=True), member("prefill", "p0")
    assert choose_successor([able, other], b"w", Demand(num_tokens=10)) is able
    decode = member("decode", "d0", load=5)
    assert choose_successor([able, decode], b"w", Demand(num_tokens=10)) is decode
    with pytest.raises(NoWorker):
        choose_successor([other], b"w", Demand(num_tokens=10))
