"""D's scheduler side: which handoffs are believed, what is loaded, and when leases are released."""

import base64

import msgspec
import pytest

from connectors.p2p.actions import TokenCopy
from connectors.vllm.consumer import Consumer
from connectors.vllm.handoff_params import MAX_VALUE_CHARS, HeldBlocks, Rank, decode_handoff, encode_handoff
from connectors.vllm.orders import RankOrders
from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.producer import Producer
from core.errors import InvalidRequest
from core.ids import SeededIds
from core.kv.hashing import BlockHasher
from tests.connectors.vllm.fake_requests import LAYOUT, MODEL, REMOTE_DECODE, FakeRequest, Status, engine, image

PROMPT = list(range(5, 75))
LOOPBACK = PeerRules(("127.0.0.0/8",))
NESTED = base64.b64encode(b"\x81\xa1x" + 150_000 * b"\x91" + b"\xc0").decode()


def handoff_of(prompt=PROMPT, table=(3, 4, 5), producer_engine=None, **request):
    """Return the ``kv_transfer_params`` of a prompt that P has computed."""
    producer_engine = producer_engine or engine()
    producer = Producer(producer_engine, BlockHasher(producer_engine.model.fingerprint), SeededIds(1), (None,))
    done = FakeRequest("p", list(prompt), REMOTE_DECODE, num_output_tokens=1, **request)
    producer.on_new_request(done)
    producer.build_orders({"p": len(prompt)}, lambda name: (list(table),))
    done.status = Status.FINISHED_LENGTH_CAPPED
    params = producer.request_finished(done, (list(table),))
    assert params is not None
    return params


def changed(params, **changes):
    """Return the parameters with a handoff of other values."""
    handoff = decode_handoff(params)
    assert handoff is not None
    return encode_handoff(msgspec.structs.replace(handoff, **changes), "p")


def new_consumer(windows=(None,), rules=LOOPBACK, **engine_fields):
    return Consumer(engine("d", **engine_fields), BlockHasher(MODEL.fingerprint), rules, windows)


@pytest.fixture
def consumer():
    return new_consumer()


def arrive(consumer, params, prompt=PROMPT, **request):
    found = FakeRequest("d", list(prompt), params, **request)
    consumer.on_new_request(found)
    return found


def take(consumer):
    found, consumer.orders = consumer.orders, RankOrders()
    return found


def test_the_rest_of_the_prompt_is_loaded_once(consumer):
    request = arrive(consumer, handoff_of())
    (hold,) = take(consumer).holds
    assert consumer.num_loadable_tokens(request, 0) == 70
    assert consumer.num_loadable_tokens(request, 32) == 38
    consumer.start_load(request, ([11, 12, 13],), 38)
    (load,) = take(consumer).loads
    assert [(unit.remote_rows, unit.local_rows, unit.num_tokens) for unit in load.units] == [
        ((4,), (12,), 32),
        ((5,), (13,), 6),
    ]
    assert load.handoff == hold
    assert consumer.num_loadable_tokens(request, 0) == 0
    consumer.start_load(request, ([11, 12, 13],), 0)  # when it runs
    assert take(consumer).is_empty()
    consumer.on_loads_ended({"d"})
    assert take(consumer).releases == [hold]
    assert consumer.num_loading == 0


def test_a_full_local_hit_releases_the_handoff(consumer):
    request = arrive(consumer, handoff_of())
    (hold,) = take(consumer).holds
    consumer.start_load(request, ([11, 12, 13],), 0)
    assert take(consumer).releases == [hold]


def test_a_request_that_ends_before_its_load_releases_the_handoff(consumer):
    arrive(consumer, handoff_of())
    (hold,) = take(consumer).holds
    consumer.request_finished("d")
    assert take(consumer).releases == [hold]


def test_a_handoff_of_several_requests_is_released_after_the_last(consumer):
    """A client asks for several choices: vLLM makes a request of each."""
    params = handoff_of()
    requests = [FakeRequest(name, PROMPT, params) for name in "abc"]
    for request in requests:
        consumer.on_new_request(request)
    assert len(set(take(consumer).holds)) == 1
    for request, table in zip(requests[:2], ([11, 12, 13], [14, 15, 16]), strict=True):
        consumer.start_load(request, (table,), 70)
    consumer.on_loads_ended({"a"})
    arrive(consumer, params, prompt=PROMPT[:-1])  # refused
    consumer.request_finished("c")
    assert not take(consumer).releases
    consumer.on_loads_ended({"b"})
    assert len(take(consumer).releases) == 1
    arrive(consumer, params, prompt=PROMPT[:-1])
    assert len(take(consumer).releases) == 1


def test_the_prompt_of_several_choices_is_hashed_once(consumer, monkeypatch):
    hashed = []
    hash_blocks = BlockHasher.hash_request_blocks

    def count(hasher, token_ids, keys):
        hashed.append(keys)
        return hash_blocks(hasher, token_ids, keys)

    params, cat, dog = handoff_of(mm_features=[image("cat", 20, 30)]), [image("cat", 20, 30)], [image("dog", 20, 30)]
    monkeypatch.setattr(BlockHasher, "hash_request_blocks", count)
    for name in "abc":
        consumer.on_new_request(FakeRequest(name, list(PROMPT), params, mm_features=cat))
    assert (len(hashed), len(take(consumer).holds), consumer.refused) == (1, 3, {})
    arrive(consumer, params, mm_features=dog)
    arrive(consumer, params, prompt=[9, *PROMPT[1:]], mm_features=cat)
    assert (len(hashed), consumer.refused) == (3, {"stale": 2}), "other prompts"
    consumer.reset(engine("d"), BlockHasher(b"other weights"))
    arrive(consumer, params, mm_features=cat)
    assert (len(hashed), consumer.refused) == (4, {"stale": 3}), "another hasher"


def test_a_handoff_that_comes_again_in_the_step_of_its_release_is_kept(consumer):
    """A router repeats a request: its abort and the next try can meet in one batch of vLLM's queue."""
    params = handoff_of()
    arrive(consumer, params)
    take(consumer)
    consumer.request_finished("d")
    request = arrive(consumer, params)
    orders = take(consumer)
    assert (len(orders.holds), orders.releases) == (1, [])
    consumer.start_load(request, ([11, 12, 13],), 70)
    consumer.on_loads_ended({"d"})
    assert take(consumer).releases == orders.holds


def test_a_handoff_that_two_refused_requests_have_released_is_kept_for_the_third(consumer):
    params = handoff_of()
    for _ in range(2):
        arrive(consumer, params, prompt=PROMPT[:-1])
    arrive(consumer, params)
    orders = take(consumer)
    assert (len(orders.holds), orders.releases) == (1, [])


def test_a_request_that_ends_during_its_load_aborts_it(consumer):
    request = arrive(consumer, handoff_of())
    consumer.start_load(request, ([11, 12, 13],), 70)
    take(consumer)
    consumer.request_finished("d")
    assert take(consumer).aborts == ["d"]
    consumer.on_loads_ended({"d"})
    assert len(take(consumer).releases) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "tenant"},
        {"mm_features": [image("cat", 3, 8)]},
        {"prompt": [*PROMPT[:-1], 9]},
        {"prompt": [9, *PROMPT[1:]]},
        {"prompt": PROMPT[:-1]},
    ],
    ids=["salt", "image", "last token", "first token", "shorter"],
)
def test_a_handoff_of_another_prompt_is_released_unread(consumer, change):
    request = arrive(consumer, handoff_of(), **change)
    assert consumer.num_loadable_tokens(request, 0) == 0
    orders = take(consumer)
    assert (len(orders.holds), len(orders.releases)) == (0, 1)
    assert consumer.refused == {"stale": 1}


def test_images_and_salt_of_the_same_request_fit(consumer):
    what = {"cache_salt": "tenant", "mm_features": [image("cat", 3, 8)]}
    request = arrive(consumer, handoff_of(**what), **what)
    assert consumer.num_loadable_tokens(request, 0) == 70


@pytest.mark.parametrize(
    ("field", "value"), [("weights", "other"), ("dtype", "bfloat16"), ("attention", "FLASH_ATTN"), ("weights_epoch", 1)]
)
def test_another_model_is_refused_with_both_values(consumer, caplog, field, value):
    model = msgspec.structs.replace(MODEL, **{field: value})
    arrive(consumer, handoff_of(producer_engine=engine(model=model)))
    assert consumer.refused == {"layout": 1}
    assert f"{field} {value!r} at the peer, {getattr(MODEL, field)!r} here" in caplog.text


@pytest.mark.parametrize(("changes", "is_hinted"), [({}, True), ({"dtype": "bfloat16"}, False)])
def test_what_helps_against_other_epochs_is_said_where_nothing_else_differs(consumer, caplog, changes, is_hinted):
    model = msgspec.structs.replace(MODEL, weights_epoch=1, **changes)
    arrive(consumer, handoff_of(producer_engine=engine(model=model)))
    assert consumer.refused == {"layout": 1}
    assert ("reset the one with the lower epoch, or restart both" in caplog.text) == is_hinted


HALF = {"num_kv_heads": 1, "block_bytes": LAYOUT.block_bytes // 2}
TWO_RANKS = (Rank("tcp://127.0.0.1:7000", 1), Rank("tcp://127.0.0.1:7001", 2))


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"block_bytes": 2 * LAYOUT.block_bytes}, None, "block_bytes 131072 at the peer, 65536 at d"),
        ({"order": "HNC-amx"}, None, "order HNC-amx at the peer, HNC at d"),
        ({}, TWO_RANKS, "2 KV heads in a block at the peer, 1 of 2 on 2 ranks"),
        (
            HALF,
            None,
            "1 KV heads in a block at the peer, 2 of 2 on 1 ranks",
        ),
    ],
    ids=["bytes", "order", "too many heads", "too few heads"],
)
def test_another_layout_is_refused_with_both_values(consumer, caplog, changes, ranks, message):
    layout = msgspec.structs.replace(LAYOUT, **changes)
    arrive(consumer, handoff_of(producer_engine=engine(layout=layout, **({"ranks": ranks} if ranks else {}))))
    assert consumer.refused == {"layout": 1}
    assert message in caplog.text


def test_heads_that_cannot_be_told_apart_need_as_many_ranks():
    opaque = msgspec.structs.replace(LAYOUT, order="opaque")
    ours = Consumer(engine("d", layout=opaque), BlockHasher(MODEL.fingerprint), LOOPBACK, (None,))
    arrive(ours, handoff_of(producer_engine=engine(layout=opaque)))
    arrive(ours, handoff_of(producer_engine=engine(layout=opaque, ranks=TWO_RANKS)))
    assert ours.refused == {"layout": 1}


def test_blocks_with_other_layers_at_the_same_places_are_refused_with_both_digests(caplog):
    ours, theirs = (msgspec.structs.replace(LAYOUT, order=order) for order in ("opaque-1", "opaque-2"))
    consumer = new_consumer(layout=ours)
    arrive(consumer, handoff_of(producer_engine=engine(layout=theirs)))
    assert consumer.refused == {"layout": 1}
    assert "order opaque-2 at the peer, opaque-1 at d" in caplog.text


@pytest.mark.parametrize("num_peers", [3, 6])
def test_ranks_that_vllm_cannot_split_the_heads_among_are_refused(caplog, num_peers):
    """Of 4 heads on 3 ranks one has no holder."""
    four, one = (
        msgspec.structs.replace(LAYOUT, num_kv_heads=count, block_bytes=count * LAYOUT.block_bytes // 2) for count in (4, 1)
    )
    ours = new_consumer(layout=four, num_kv_heads=4)
    ranks = tuple(Rank(f"tcp://127.0.0.1:{7000 + number}", number) for number in range(num_peers))
    arrive(ours, handoff_of(producer_engine=engine(layout=one, ranks=ranks)))
    orders = take(ours)
    assert (ours.refused, orders.holds, len(orders.releases)) == ({"layout": 1}, [], 1)
    assert f"4 KV heads cannot be split among the peer's {num_peers} ranks" in caplog.text


def test_blocks_of_another_shape_are_loaded_by_copies(consumer):
    half = msgspec.structs.replace(LAYOUT, **HALF)
    request = arrive(consumer, handoff_of(producer_engine=engine(layout=half, ranks=TWO_RANKS)))
    consumer.start_load(request, ([11, 12, 13],), 70)
    (load,) = take(consumer).loads
    assert (load.layout, len(load.handoff.ranks)) == (half, 2)
    assert [unit.copies for unit in load.units] == [
        (TokenCopy(remote, 0, local, 0, 32),) for remote, local in ((3, 11), (4, 12), (5, 13))
    ]
    assert not consumer.refused


OTHER_INCARNATION = Rank(TWO_RANKS[0].control_address, 9)
ELSEWHERE = Rank("tcp://127.0.0.1:8000", 2)
SHARED = pytest.mark.parametrize(
    "ranks",
    [TWO_RANKS[:1], (OTHER_INCARNATION,), (OTHER_INCARNATION, TWO_RANKS[1]), (TWO_RANKS[0], ELSEWHERE)],
    ids=["fewer ranks", "fewer, of another incarnation", "another incarnation", "one of two addresses"],
)


def shares_of(ranks):
    """Return a handoff of two ranks, and one of its name that a client has given these ranks."""
    half = msgspec.structs.replace(LAYOUT, **HALF)
    right = handoff_of(producer_engine=engine(layout=half, ranks=TWO_RANKS))
    return right, changed(right, ranks=ranks, layout=LAYOUT if len(ranks) == 1 else half)


@SHARED
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_handoff_is_released_after_all_that_need_one_of_its_leases(consumer, ranks, is_refused):
    """A release ends a lease for anyone, and names neither the other ranks of its handoff nor an incarnation."""
    right, forged = shares_of(ranks)
    consumer.start_load(arrive(consumer, right), ([11, 12, 13],), 70)
    consumer.on_new_request(FakeRequest("other", PROMPT[:-1] if is_refused else PROMPT, forged))
    consumer.request_finished("other")
    assert len(take(consumer).holds) == (1 if is_refused else 2)
    assert consumer.orders.is_empty()
    consumer.on_loads_ended({"d"})
    assert sorted(len(remote.ranks) for remote in take(consumer).releases) == sorted([2, len(ranks)])
    assert consumer.orders.is_empty()


@SHARED
def test_a_release_waits_for_a_handoff_that_comes_in_the_same_step(consumer, ranks):
    right, forged = shares_of(ranks)
    arrive(consumer, forged, prompt=PROMPT[:-1])
    arrive(consumer, right)
    orders = take(consumer)
    assert (len(orders.holds), orders.releases) == (1, [])
    consumer.request_finished("d")
    assert len(take(consumer).releases) == 2


def test_a_handoff_that_shares_only_the_name_of_another_is_released_at_once(consumer):
    right, forged = shares_of((ELSEWHERE, TWO_RANKS[0]))
    arrive(consumer, right)
    arrive(consumer, forged, prompt=PROMPT[:-1])
    assert [remote.ranks[0].address for remote in take(consumer).releases] == [ELSEWHERE.control_address]


LONG = msgspec.structs.replace(LAYOUT, block_size=64, block_bytes=2 * LAYOUT.block_bytes)


def test_blocks_of_another_size_are_not_converted_for_windows(caplog):
    ours = new_consumer(windows=(64,))
    arrive(ours, handoff_of(table=(3, 4), producer_engine=engine(layout=LONG)))
    assert ours.refused == {"layout": 1}
    assert "block_size 64 at the peer, 32 here: blocks of sliding windows" in caplog.text


def test_blocks_of_another_size_are_loaded_in_common_units(consumer):
    request = arrive(consumer, handoff_of(table=(3, 4), producer_engine=engine(layout=LONG)))
    consumer.start_load(request, ([11, 12, 13],), 70)
    (load,) = take(consumer).loads
    assert [(unit.remote_rows, unit.local_rows, unit.num_tokens) for unit in load.units] == [
        ((3,), (11, 12), 64),
        ((4,), (13,), 6),
    ]


def test_only_allowed_peers_hear_of_a_handoff(consumer):
    far = engine(ranks=(Rank("tcp://127.0.0.1:7000", 1), Rank("tcp://8.8.8.8:53", 2)))
    arrive(consumer, handoff_of(producer_engine=far))
    assert take(consumer).is_empty()
    assert consumer.refused == {"rejected": 1}


def test_a_request_that_was_rejected_releases_the_handoff(consumer):
    arrive(consumer, handoff_of(), prompt=[0], abort_immediately=True)
    orders = take(consumer)
    assert len(orders.releases) == 1
    assert not orders.holds
    assert not consumer.refused


@pytest.mark.parametrize(
    "groups",
    [
        (HeldBlocks(1, (4, 5), (2, 3)),),
        (HeldBlocks(0, (3, 4), (1, 2)),),
        (HeldBlocks(0, (3, 4, 5, 6), (1, 2, 3, 4)),),
        (HeldBlocks(0, (3, 4, 5), (1, 2, 3)), HeldBlocks(0, (3, 4, 5), (1, 2, 3))),
    ],
    ids=["first block lacks", "last block lacks", "too many", "another group"],
)
def test_a_handoff_that_lacks_blocks_is_refused(consumer, groups):
    request = arrive(consumer, changed(handoff_of(), groups=groups))
    assert consumer.num_loadable_tokens(request, 0) == 0
    assert consumer.refused == {"stale": 1}


def test_blocks_before_a_window_may_lack():
    consumer = new_consumer(windows=(20,))
    request = arrive(consumer, handoff_of(table=(0, 4, 5)))
    assert consumer.num_loadable_tokens(request, 0) == 70
    consumer.start_load(request, ([0, 12, 13],), 70)
    (load,) = take(consumer).loads
    assert [unit.local_rows for unit in load.units] == [(12,), (13,)]
    wide = new_consumer(windows=(60,))
    arrive(wide, handoff_of(table=(0, 4, 5)))
    assert wide.refused == {"stale": 1}


@pytest.mark.parametrize(
    "value",
    [7, "%%%", "AAAA", "A" * (MAX_VALUE_CHARS + 4), "", NESTED],
    ids=["a number", "no base64", "no msgpack", "too long", "empty", "nested too deep"],
)
def test_a_value_that_is_none_of_ours_is_refused(consumer, value):
    with pytest.raises(InvalidRequest, match=r"kv_transfer_params\.kvferry"):
        decode_handoff({"kvferry": value})
    arrive(consumer, {"do_remote_prefill": True, "kvferry": value})
    assert consumer.refused == {"rejected": 1}
    assert take(consumer).is_empty()


def test_a_handoff_of_another_version_of_the_plugin_is_refused_with_both(consumer, caplog):
    """Its other fields may be others."""
    params = handoff_of()
    params["kvferry"] = base64.b64encode(msgspec.msgpack.encode({"version": 2, "ranks": "elsewhere"})).decode()
    request = arrive(consumer, params)
    assert "of version 2, this plug-in reads version 1: run one version" in caplog.text
    assert consumer.num_loadable_tokens(request, 0) == 0
    assert take(consumer).is_empty()


@pytest.mark.parametrize("params", ["", 0, [], "do_remote_prefill", ["do_remote_prefill"], 1.5])
def test_parameters_that_are_no_dictionary_are_ignored(consumer, params):
    producer = Producer(engine(), BlockHasher(MODEL.fingerprint), SeededIds(1), (None,))
    producer.on_new_request(FakeRequest("p", PROMPT, params))
    request = arrive(consumer, params)
    assert consumer.num_loadable_tokens(request, 0) == 0
    assert take(consumer).is_empty()
    assert not consumer.refused


def test_the_engine_of_a_refused_handoff_may_be_anything(consumer):
    nested = []
    for _ in range(5000):
        nested = [nested]
    arrive(consumer, {"do_remote_prefill": True, "remote_engine_id": nested})
    assert consumer.refused == {"rejected": 1}


def test_a_transfer_id_is_short_enough_for_the_names_of_leases(consumer):
    """One name that is too long for a message spoils the renewals of all leases at that peer."""
    params = handoff_of()
    for transfer_id in ("k" * 512, "k" * 65, ""):
        arrive(consumer, changed(params, transfer_id=transfer_id))
    assert consumer.refused == {"rejected": 3}
    assert take(consumer).is_empty()


def test_a_handoff_of_another_connector_is_left_alone(consumer, caplog):
    request = arrive(consumer, {"do_remote_prefill": True, "remote_engine_id": "nixl-1", "remote_block_ids": [1, 2]})
    assert consumer.num_loadable_tokens(request, 0) == 0
    assert take(consumer).is_empty()
    assert "another connector" in caplog.text


def test_a_handoff_of_a_million_tokens_in_blocks_of_16_fits():
    num_blocks, large = 65_536, 1 << 30  # of all numbers the longest
    group = HeldBlocks(0, tuple(range(large, large + num_blocks)), tuple(range(large, large + num_blocks)))
    found = decode_handoff(changed(handoff_of(), groups=(group,)))
    assert found is not None
    assert found.groups == (group,)


@pytest.mark.parametrize("ids", [(3, 3), (0, 3)])
def test_a_block_is_named_once_and_is_a_block(ids):
    params = handoff_of(prompt=PROMPT[:40], table=(3, 4))
    handoff = decode_handoff(params)
    assert handoff is not None
    msgspec.structs.force_setattr(handoff.groups[0], "block_ids", ids)
    with pytest.raises(InvalidRequest, match="null block"):
        decode_handoff(encode_handoff(handoff, "p"))
