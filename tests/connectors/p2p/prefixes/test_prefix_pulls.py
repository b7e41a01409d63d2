"""Two workers' scheduler sides, with the messages between them carried by hand: what is asked, pinned, offered and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest

from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.prefixes.messages import (
    AskPrefix,
    CancelPrefixAsk,
    PinEnded,
    PinsFreed,
    PrefixAnswered,
    PrefixAsked,
    PrefixExpired,
    PrefixFound,
    PrefixNotFound,
    PrefixUnused,
)
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.worker import P2PConnectorWorker
from connectors.reports import SendingEnded
from connectors.testing.connector_engine import ConnectorEngine
from connectors.testing.memory_pool import small_layout
from core.ids import SeededIds
from core.kv.seals import find_mismatch, layout_fingerprint
from core.request import NewRequest, Request, RequestStatus
from core.testing.clock import FakeClock
from core.wire.kv import KVHandoff, KVSource, PrefixQuestion
from core.wire.sampling import SamplingParams

BLOCK_SIZE = 32
LAYOUT = small_layout(BLOCK_SIZE)
PROMPT = list(range(100))  # three blocks and a tail


@dataclass(slots=True)
class Side:
    """One worker on a real manager. ``posted`` holds what it has sent to its event loop."""

    identity: object
    posted: list[object] = field(default_factory=list)
    clock: FakeClock = field(default_factory=lambda: FakeClock(0.0))
    submitted: list[P2PConnectorMetadata] = field(default_factory=list)
    connector: P2PConnectorScheduler = field(init=False)
    worker: P2PConnectorWorker = field(init=False)
    engine: ConnectorEngine = field(init=False)

    def __post_init__(self) -> None:
        self.connector = P2PConnectorScheduler(
            self.identity,
            lease_ms=30_000,
            ids=SeededIds(3),
            grant=self.posted.append,
            now=self.clock.now,
            post=self.posted.append,
        )
        self.connector.control_address = "tcp://10.0.0.1:5600"
        self.worker = P2PConnectorWorker(self.submitted.append)
        self.engine = ConnectorEngine(self.connector, self.worker, self.identity.model_fingerprint, LAYOUT)

    def step(self) -> P2PConnectorMetadata:
        self.submitted.clear()
        self.engine.step()
        return self.submitted[0] if self.submitted else P2PConnectorMetadata()

    def request(self, prompt: list[int], source: KVSource | None, name: str = "r", **fields: object) -> Request:
        sampling = SamplingParams(max_tokens=8)
        request = Request(
            NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, kv_source=source, **fields),
            self.engine.hasher,
        )
        self.connector.on_new_request(request)
        return request

    def take(self, kind: type) -> list:
        found = [event for event in self.posted if isinstance(event, kind)]
        self.posted = [event for event in self.posted if event not in found]
        self.connector.pulls._post = self.connector.pins._post = self.posted.append
        return found


@pytest.fixture
async def source(make_identity) -> Iterator[Side]:
    side = Side(make_identity("decode-0", 42, layout=LAYOUT))
    yield side
    side.engine.close()


@pytest.fixture
async def reader(make_identity) -> Iterator[Side]:
    side = Side(make_identity("prefill-0", 77, layout=LAYOUT))
    yield side
    side.engine.close()


def hold(side: Side, prompt: list[int], name: str = "before") -> None:
    """Let a worker have computed a prompt, which stays in its prefix cache."""
    side.engine.prefill(name, prompt)
    side.worker.report(SendingEnded(name))
    side.step()
    side.take(object)


def named(side: Side, num_tokens: int = 96) -> KVSource:
    identity = side.identity
    return KVSource(
        engine_id=identity.engine_id,
        incarnation=identity.incarnation,
        control_address="tcp://10.0.0.1:5600",
        num_tokens=num_tokens,
        patience_ms=900,
    )


def ask(reader: Side, request: Request, num_computed: int = 0) -> AskPrefix | None:
    count, is_async = reader.connector.get_num_new_matched_tokens(request, num_computed)
    asks = reader.take(AskPrefix)
    assert (count is None) == bool(asks)
    assert not is_async
    return asks[0] if asks else None


def answer(source: Side, asked: AskPrefix, **changes: object):
    question = PrefixQuestion(
        number=1,
        engine_id="prefill-0",
        incarnation=42,
        model_fingerprint=source.identity.model_fingerprint,
        block_size=asked.block_size,
        chain=asked.chain,
    )
    source.worker.report(PrefixAsked(b"reader", msgspec.structs.replace(question, **changes)))
    source.step()
    source.step()
    (found,) = [*source.take(PrefixFound), *source.take(PrefixNotFound)]
    return found


def tell(
    reader: Side, request_id: str, handoff: KVHandoff | None, refusal: str | None = None, asked_s: float = 0.01
) -> P2PConnectorMetadata:
    reader.worker.report(PrefixAnswered(request_id, handoff, refusal, 5.0, asked_s))
    reader.step()
    return reader.step()


def free_blocks(side: Side) -> int:
    return side.engine.manager.block_pool.num_free_blocks


async def test_what_the_source_holds_is_pinned_described_and_loaded(source, reader):
    hold(source, PROMPT)
    num_free = free_blocks(source)
    request = reader.request(PROMPT, named(source))
    asked = ask(reader, request)
    assert reader.connector.get_num_new_matched_tokens(request, 0) == (None, False)
    assert not reader.posted, "a question is asked once"
    found = answer(source, asked)
    assert isinstance(found, PrefixFound)
    assert (found.handoff.num_tokens, found.num_blocks) == (96, 3)
    assert free_blocks(source) == num_free - 3
    held = tell(reader, "r", found.handoff)
    assert [ref.transfer_id for ref in held.holds] == [found.handoff.transfer_id]
    assert reader.connector.get_num_new_matched_tokens(request, 0) == (96, True)
    manager = reader.engine.manager
    assert manager.allocate_slots(request, 0, num_external_computed_tokens=96, delay_cache_blocks=True) is not None
    reader.connector.update_state_after_alloc(request, manager.get_blocks("r"), 96)
    assert request.has_optional_load
    (pull,) = reader.step().pulls
    assert pull.deadline == 5.0
    seals, version = source.engine.manager.block_pool.seals, layout_fingerprint(LAYOUT)
    for unit in pull.units:
        assert find_mismatch(seals.row(unit.remote_rows[0]), unit.expected[0], seals.incarnation, version) is None
    source.worker.report(PinEnded(found.handoff.transfer_id))
    source.step()
    assert free_blocks(source) == num_free
    manager.free(request)


async def test_only_the_readers_own_prompt_can_match(source, reader):
    hold(source, PROMPT)
    request = reader.request(PROMPT, named(source), cache_salt="tenant")
    found = answer(source, ask(reader, request))
    assert isinstance(found, PrefixNotFound)
    assert found.refusal == "missing"


async def test_the_hit_ends_where_the_prompts_differ(source, reader):
    hold(source, PROMPT)
    request = reader.request([*PROMPT[:70], *range(900, 930)], named(source))
    assert answer(source, ask(reader, request)).handoff.num_tokens == 64


async def test_a_handoff_of_another_prompt_is_released_and_not_offered(source, reader):
    hold(source, PROMPT)
    other = list(range(500, 600))
    handoff = answer(source, ask(reader, reader.request(PROMPT, named(source), "theirs"))).handoff
    request = reader.request(other, named(source))
    ask(reader, request)
    released = tell(reader, "r", handoff)
    assert [ref.transfer_id for ref in released.releases] == [handoff.transfer_id]
    assert reader.connector.get_num_new_matched_tokens(request, 0) == (0, False)


async def test_a_chain_is_taken_as_far_as_a_prompt_here_can_be_long(source, reader, monkeypatch):
    hold(source, PROMPT)
    manager, lengths = source.engine.manager, []
    find = manager.coordinator.find_longest_cache_hit
    monkeypatch.setattr(
        manager.coordinator, "find_longest_cache_hit", lambda chain, most: lengths.append(len(chain)) or find(chain, most)
    )
    asked = ask(reader, reader.request(PROMPT, named(source)))
    found = answer(source, asked, chain=asked.chain + bytes(1 << 20))
    assert found.handoff.num_tokens == 96
    assert max(lengths) <= manager.max_model_len // manager.hash_block_size


async def test_a_prompt_as_long_as_one_here_can_be_is_found_whole(source, reader):
    hold(source, PROMPT[:96])
    source.engine.manager.max_model_len = 96
    assert answer(source, ask(reader, reader.request(PROMPT, named(source)))).handoff.num_tokens == 96


@pytest.mark.parametrize("num_held", [32, 64, 95])
async def test_nothing_is_asked_for_less_than_a_block(source, reader, num_held):
    request = reader.request(PROMPT, named(source, num_tokens=num_held))
    assert ask(reader, request, num_computed=64) is None
    assert ask(reader, reader.request(PROMPT, None, "no source")) is None


async def test_a_refused_request_computes_and_asks_again_only_after_a_preemption(source, reader):
    request = reader.request(PROMPT, named(source))
    assert ask(reader, request) is not None
    tell(reader, "r", None, "missing")
    assert ask(reader, request) is None
    request.num_preemptions += 1
    assert ask(reader, request) is not None


def other(source, name, num_tokens=96):
    return msgspec.structs.replace(named(source, num_tokens), engine_id=name, control_address=f"tcp://{name}:1")


def named_with_others(source, *names, patience_ms=0):
    others = tuple(other(source, name) for name in names)
    return msgspec.structs.replace(named(source), others=others, patience_ms=patience_ms)


async def test_the_next_source_is_asked_if_one_has_nothing_and_again_after_a_preemption(source, reader):
    request = reader.request(PROMPT, named_with_others(source, "b", "c"))
    first = named(source).engine_id
    for expected in (first, "b", "c"):
        assert ask(reader, request).source.engine_id == expected
        tell(reader, "r", None, "missing")
    assert ask(reader, request) is None
    request.num_preemptions += 1
    assert ask(reader, request).source.engine_id == first


async def test_another_source_that_holds_no_block_more_is_passed_over(source, reader):
    others = (other(source, "b", num_tokens=32), other(source, "c"))
    request = reader.request(PROMPT, msgspec.structs.replace(named(source), others=others))
    assert ask(reader, request, num_computed=32) is not None
    tell(reader, "r", None, "pressure")
    assert ask(reader, request, num_computed=32).source.engine_id == "c"


async def test_all_sources_share_the_patience(source, reader):
    request = reader.request(PROMPT, named_with_others(source, "b", "c", patience_ms=4000))
    assert ask(reader, request).patience_s == 4.0
    tell(reader, "r", None, "busy", asked_s=1.5)
    assert ask(reader, request).patience_s == 2.5
    tell(reader, "r", None, "deadline", asked_s=2.5)
    assert ask(reader, request) is None


async def test_no_other_source_is_asked_after_an_answer(source, reader):
    hold(source, PROMPT)
    request = reader.request(PROMPT, named_with_others(source, "b"))
    handoff = answer(source, ask(reader, request)).handoff
    tell(reader, "r", handoff)
    assert reader.connector.get_num_new_matched_tokens(request, 0) == (handoff.num_tokens, True)
    assert reader.take(AskPrefix) == []


async def test_the_end_of_a_request_cancels_its_question_and_frees_a_late_answer(source, reader):
    hold(source, PROMPT)
    request = reader.request(PROMPT, named(source))
    handoff = answer(source, ask(reader, request)).handoff
    request.status = RequestStatus.FINISHED_ABORTED
    reader.connector.request_finished(request, ([],))
    assert reader.take(CancelPrefixAsk) == [CancelPrefixAsk("r")]
    assert [ref.transfer_id for ref in tell(reader, "r", handoff).releases] == [handoff.transfer_id]


async def test_pins_are_bounded_refused_under_pressure_and_freed_for_own_requests(source, reader):
    hold(source, PROMPT)
    pool = source.engine.manager.block_pool
    asked = ask(reader, reader.request(PROMPT, named(source)))
    num_pins = 0
    while isinstance(found := answer(source, asked), PrefixFound):
        num_pins += 1
    assert found.refusal == "limit"
    assert 3 * num_pins <= pool.num_usable_blocks // 4
    source.connector.free_spare_blocks()
    (freed,) = source.take(PinsFreed)
    assert len(freed.transfer_ids) == num_pins
    source.connector.free_spare_blocks()
    assert not source.take(PinsFreed)
    assert pool.num_free_blocks == pool.num_usable_blocks
    taken = pool.get_new_blocks(pool.num_free_blocks - 4)
    assert answer(source, asked).refusal in ("pressure", "missing")
    pool.free_blocks(taken)


async def test_blocks_that_are_hits_before_they_are_sealed_are_not_described(source, reader):
    hold(source, PROMPT)
    asked = ask(reader, reader.request(PROMPT, named(source)))
    pool = source.engine.manager.block_pool
    second = source.engine.manager.coordinator.find_longest_cache_hit(
        [asked.chain[start : start + 16] for start in range(0, len(asked.chain), 16)], 96
    )[0][0][1]
    pool.break_seals([second])
    assert answer(source, asked).handoff.num_tokens == 32


async def test_a_request_that_gets_its_blocks_otherwise_waits_for_no_answer(source, reader):
    hold(source, PROMPT)
    request = reader.request(PROMPT, named(source))
    handoff = answer(source, ask(reader, request)).handoff
    manager = reader.engine.manager
    assert manager.allocate_slots(request, 100) is not None
    reader.connector.update_state_after_alloc(request, manager.get_blocks("r"), 0)  # a tier before it loads them
    assert reader.take(CancelPrefixAsk) == [CancelPrefixAsk("r")]
    told = tell(reader, "r", handoff)
    assert ([ref.transfer_id for ref in told.releases], told.holds) == ([handoff.transfer_id], [])
    manager.free(request)


def answered(source: Side, reader: Side) -> tuple[Request, str]:
    """Let a request have an answer, to be used by 5.0 s; return it and the name of the handoff."""
    hold(source, PROMPT)
    request = reader.request(PROMPT, named(source))
    handoff = answer(source, ask(reader, request)).handoff
    tell(reader, "r", handoff)
    assert reader.connector.get_num_new_matched_tokens(request, 0) == (96, True), "there are no blocks for it yet"
    return request, handoff.transfer_id


@pytest.mark.parametrize("is_looked_at", [True, False])
async def test_an_answer_is_released_if_its_request_gets_no_blocks_in_time(source, reader, is_looked_at):
    request, transfer_id = answered(source, reader)
    reader.clock.advance(4.9)
    assert reader.step().releases == []
    reader.clock.advance(0.1)
    if is_looked_at:  # by chance, before the event loop has told
        assert reader.connector.get_num_new_matched_tokens(request, 0) == (0, False), "it computes its prompt"
        told = reader.step()
    else:
        reader.worker.report(PrefixExpired("r"))
        reader.step()
        assert reader.connector.has_pending_push_work(), "the engine would sleep"
        told = reader.step()
    assert ([ref.transfer_id for ref in told.releases], told.pulls) == ([transfer_id], [])
    assert reader.take(PrefixUnused) == [PrefixUnused("r")]
    assert reader.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert reader.take(AskPrefix) == []


async def test_an_answer_from_which_a_request_loads_is_not_given_up(source, reader):
    request, _ = answered(source, reader)
    manager = reader.engine.manager
    assert manager.allocate_slots(request, 0, num_external_computed_tokens=96, delay_cache_blocks=True) is not None
    reader.connector.update_state_after_alloc(request, manager.get_blocks("r"), 96)
    reader.clock.advance(5.0)
    reader.worker.report(PrefixExpired("r"))
    told = reader.step()
    assert (len(told.pulls), told.releases) == (1, [])
    assert reader.take(PrefixUnused) == []
    manager.free(request)
