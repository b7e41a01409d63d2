"""Several connectors at once: which one loads, which ones save, and when blocks are free."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

import connectors.multi.connector
from connectors.multi.connector import MultiConnector
from connectors.multi.scheduler import MultiConnectorScheduler
from connectors.multi.worker import LayerwiseMultiConnectorWorker, MultiConnectorWorker, multi_connector_worker
from connectors.registry import connector_factory
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection
from core.connector import Connector, KVConnectorScheduler, KVConnectorWorker
from core.errors import ConfigError, ConnectorUnavailable
from core.request import KVConnectorMetadata, KVConnectorOutput, KVConnectorWorkerMetadata, SchedulerOutput
from core.wire.messages import ErrorInfo, TransferUsage


@dataclass(frozen=True)
class Message(KVConnectorMetadata):
    text: str


@dataclass(frozen=True)
class News(KVConnectorWorkerMetadata):
    text: str


class FakeScheduler(KVConnectorScheduler):
    """Gives scripted answers, and records its calls."""

    def __init__(self, name, answer=(0, False), keeps=False, handoff=None):
        self.name, self.answer, self.keeps, self.handoff = name, answer, keeps, handoff
        self.heard = []
        self.events = []
        self.has_work = self.frees = False

    def on_new_request(self, request):
        self.heard.append("new")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.heard.append("asked")
        return self.answer

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.heard.append(("alloc", blocks, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        return Message(self.name)

    def update_connector_output(self, output):
        self.heard.append(("output", output.worker_meta))

    def request_finished(self, request, block_ids):
        return self.keeps, self.handoff

    def take_events(self):
        return self.events

    def has_pending_push_work(self):
        return self.has_work

    def has_pending_block_frees(self):
        return self.frees


class FakeWorker(KVConnectorWorker):
    """Reports on command."""

    def __init__(self):
        self.output = KVConnectorOutput()
        self.bad = set()
        self.heard = []

    def register_kv_caches(self, pool):
        self.heard.append(("pool", pool))

    def set_wakeup(self, wakeup):
        self.heard.append(("wakeup", wakeup))

    def handle_preemptions(self, metadata):
        self.heard.append(("preempted", metadata))

    def start_load_kv(self, metadata):
        self.heard.append(metadata)

    def get_transfer_results(self, finished_req_ids):
        output, self.output = self.output, KVConnectorOutput()
        return output

    def get_block_ids_with_load_errors(self):
        return self.bad


class LayerwiseWorker(FakeWorker):
    def save_kv_layer(self, layer):
        self.heard.append(layer)


REQUEST = SimpleNamespace(request_id="r", is_early=False)
BLOCKS = object()


def test_first_connector_with_a_hit_loads_and_the_others_load_nothing():
    parts = [FakeScheduler("a"), FakeScheduler("b", (64, True)), FakeScheduler("c", (128, False))]
    multi = MultiConnectorScheduler(parts)
    assert multi.get_num_new_matched_tokens(REQUEST, 0) == (64, True)
    multi.update_state_after_alloc(REQUEST, BLOCKS, 64)
    assert [part.heard[-1] for part in parts] == [("alloc", BLOCKS, 0), ("alloc", BLOCKS, 64), ("alloc", BLOCKS, 0)]
    multi.update_state_after_alloc(REQUEST, BLOCKS, 0)  # it starts to run
    assert [part.heard[-1] for part in parts] == [("alloc", BLOCKS, 0)] * 3


def test_a_connector_without_an_answer_is_waited_for_if_no_earlier_one_has_a_hit():
    parts = [FakeScheduler("a"), FakeScheduler("b", (None, False)), FakeScheduler("c", (128, True))]
    multi = MultiConnectorScheduler(parts)
    assert multi.get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    parts[0].answer = (16, True)
    assert multi.get_num_new_matched_tokens(REQUEST, 0) == (16, True)


def test_choice_of_an_earlier_attempt_does_not_outlive_it():
    parts = [FakeScheduler("a", (64, True)), FakeScheduler("b")]
    multi = MultiConnectorScheduler(parts)
    multi.get_num_new_matched_tokens(REQUEST, 0)
    parts[0].answer = (0, False)
    assert multi.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    multi.update_state_after_alloc(REQUEST, BLOCKS, 0)
    assert parts[0].heard[-1] == ("alloc", BLOCKS, 0)


def test_each_gets_its_own_message_and_hears_its_own_worker():
    parts = [FakeScheduler("a"), FakeScheduler("b")]
    workers = [FakeWorker(), FakeWorker()]
    multi, worker = MultiConnectorScheduler(parts), MultiConnectorWorker(workers)
    worker.start_load_kv(multi.build_connector_meta(SchedulerOutput()))
    assert [side.heard for side in workers] == [[Message("a")], [Message("b")]]
    workers[1].output.worker_meta = News("b")
    multi.update_connector_output(worker.get_transfer_results(set()))
    assert [part.heard[-1] for part in parts] == [("output", None), ("output", News("b"))]
    multi.update_connector_output(worker.get_transfer_results(set()))
    assert [part.heard[-1] for part in parts] == [("output", None)] * 2


@pytest.mark.parametrize("num_savers", [1, 2, 3])
def test_blocks_are_free_when_the_last_that_reads_them_is_done(num_savers):
    parts = [FakeScheduler(name, keeps=index < num_savers) for index, name in enumerate("abc")]
    workers = [FakeWorker() for _ in parts]
    multi, worker = MultiConnectorScheduler(parts), MultiConnectorWorker(workers)
    assert multi.request_finished(REQUEST, ([1],)) == (True, None)
    assert multi.has_pending_push_work() == (num_savers > 1), "the count must reach the other side"
    worker.start_load_kv(multi.build_connector_meta(SchedulerOutput()))
    for index in range(num_savers):
        workers[index].output.finished_sending.add("r")
        expected = {"r"} if index == num_savers - 1 else set()
        assert worker.get_transfer_results(set()).finished_sending == expected
    worker.start_load_kv(multi.build_connector_meta(SchedulerOutput()))
    workers[0].output.finished_sending.add("r")
    assert worker.get_transfer_results(set()).finished_sending == {"r"}, "the next request of this name counts anew"


def test_ends_in_the_same_step_count_each():
    parts = [FakeScheduler(name, keeps=True) for name in "abc"]
    workers = [FakeWorker() for _ in parts]
    multi, worker = MultiConnectorScheduler(parts), MultiConnectorWorker(workers)
    multi.request_finished(REQUEST, ([1],))
    worker.start_load_kv(multi.build_connector_meta(SchedulerOutput()))
    for side in workers[:2]:
        side.output.finished_sending.add("r")
    assert worker.get_transfer_results(set()).finished_sending == set()
    workers[2].output.finished_sending.add("r")
    assert worker.get_transfer_results(set()).finished_sending == {"r"}


def test_handoff_of_one_is_that_of_all():
    multi = MultiConnectorScheduler([FakeScheduler("a"), FakeScheduler("b", keeps=True, handoff="handoff")])
    assert multi.request_finished(REQUEST, ([1],)) == (True, "handoff")


def test_failures_are_merged():
    workers = [FakeWorker(), FakeWorker()]
    errors = [ErrorInfo(code="digest", message="a"), ErrorInfo(code="stale", message="b")]
    for index, side in enumerate(workers):
        name = f"r{index}"
        side.output = KVConnectorOutput(
            finished_recving={name},
            invalid_block_ids={index},
            failed_recving={name: errors[index]},
            load_errors={f"{name}/x": errors[index]},
            quarantined_block_ids={10 + index},
            unquarantined_block_ids={20 + index},
            transfer_usage={name: TransferUsage(transferred_tokens=index)},
        )
        side.bad = {30 + index}
    worker = MultiConnectorWorker(workers)
    output = worker.get_transfer_results(set())
    assert output.finished_recving == {"r0", "r1"}
    assert output.invalid_block_ids == {0, 1}
    assert output.failed_recving == {"r0": errors[0], "r1": errors[1]}
    assert output.load_errors == {"r0/x": errors[0], "r1/x": errors[1]}
    assert output.quarantined_block_ids == {10, 11}
    assert output.unquarantined_block_ids == {20, 21}
    assert set(output.transfer_usage) == {"r0", "r1"}
    assert worker.get_block_ids_with_load_errors() == {30, 31}
    assert worker.get_transfer_results(set()).is_empty()


def test_everything_else_reaches_all():
    workers = [FakeWorker(), FakeWorker()]
    worker = MultiConnectorWorker(workers)
    worker.register_kv_caches("pool")
    worker.set_wakeup("wake")
    assert [side.heard for side in workers] == [[("pool", "pool"), ("wakeup", "wake")]] * 2
    parts = [FakeScheduler("a"), FakeScheduler("b")]
    parts[0].events, parts[1].events = [1], [2]
    multi = MultiConnectorScheduler(parts)
    assert list(multi.take_events()) == [1, 2]
    assert not multi.has_pending_push_work()
    assert not multi.has_pending_block_frees()
    parts[1].has_work = parts[1].frees = True
    assert multi.has_pending_push_work()
    assert multi.has_pending_block_frees()


@pytest.mark.parametrize(
    ("num_references", "saved", "frees"),
    [
        ({1: 2}, ([1], [1]), True),
        ({1: 3}, ([1], [1]), False),
        ({1: 2, 2: 2}, ([1], [2]), False),
        ({1: 3, 2: 2, 3: 2}, ([1, 3], [1], [1, 2, 3]), True),
        ({1: 3, 2: 3, 3: 3}, ([1, 3], [2], [1, 2, 3]), False),
    ],
)
def test_blocks_that_only_several_parts_hold_are_about_to_be_freed(num_references, saved, frees):
    parts = [FakeScheduler("a") for _ in saved]
    for part, block_ids in zip(parts, saved, strict=True):
        part.soon_released_blocks = dict.fromkeys(block_ids).keys
    multi = MultiConnectorScheduler([*parts, FakeScheduler("p2p")])
    blocks = {block_id: SimpleNamespace(ref_cnt=count) for block_id, count in num_references.items()}
    multi._manager = SimpleNamespace(block_pool=SimpleNamespace(blocks=blocks))
    assert multi.has_pending_block_frees() == frees


def test_blocks_of_one_part_are_not_counted_again():
    parts = [FakeScheduler("a"), FakeScheduler("b")]
    parts[0].soon_released_blocks = {1: None}.keys
    multi = MultiConnectorScheduler(parts)
    multi._manager = SimpleNamespace(block_pool=SimpleNamespace(blocks=None))
    assert not multi.has_pending_block_frees()


def test_layers_are_hooked_only_if_a_connector_needs_them():
    assert type(multi_connector_worker([FakeWorker()])) is MultiConnectorWorker
    hooked = multi_connector_worker([FakeWorker(), LayerwiseWorker()])
    assert type(hooked) is LayerwiseMultiConnectorWorker
    hooked.save_kv_layer(3)
    assert hooked._connectors[1].heard == [3]


@dataclass
class FakeConnector(Connector):
    name: str
    log: list
    error: Exception | None = None
    names: tuple = ()
    digests: bool = False
    saving: set | None = None
    scheduler: KVConnectorScheduler = field(default_factory=lambda: FakeScheduler(""))
    worker: KVConnectorWorker = field(default_factory=FakeWorker)

    @property
    def transports(self):
        return self.names

    @property
    def has_digests(self):
        return self.digests

    async def start(self):
        self.log.append(f"start {self.name}")
        if self.error:
            raise self.error

    async def stop(self):
        self.log.append(f"stop {self.name}")

    def expect(self, handoff):
        self.log.append((self.name, "expect", handoff))

    def release(self, transfer_ids):
        self.log.append((self.name, *transfer_ids))

    def num_leased_blocks(self):
        return 3

    def num_saving_blocks(self):
        return 2 if self.saving is None else len(self.saving)

    def saving_block_ids(self):
        return self.saving

    def longest_lease_s(self):
        return float(ord(self.name))


async def test_one_that_cannot_start_takes_those_down_that_have():
    log = []
    multi = MultiConnector(
        [FakeConnector("a", log), FakeConnector("b", log, ConnectorUnavailable("no")), FakeConnector("c", log)]
    )
    with pytest.raises(ConnectorUnavailable):
        await multi.start()
    assert log == ["start a", "start b", "stop b", "stop a"]


async def test_the_last_is_stopped_first():
    log = []
    multi = MultiConnector([FakeConnector("a", log), FakeConnector("b", log)])
    await multi.start()
    await multi.stop()
    assert log == ["start a", "start b", "stop b", "stop a"]


def test_numbers_and_names_of_all():
    log = []
    multi = MultiConnector([FakeConnector("a", log, names=("shm", "tcp"), digests=True), FakeConnector("b", log)])
    assert (multi.num_leased_blocks(), multi.num_saving_blocks(), multi.longest_lease_s()) == (6, 4, 98.0)
    assert multi.transports == ("shm", "tcp")
    assert multi.has_digests, "a tier checks digests by itself"
    multi.release(["kv-1"])
    multi.expect("kv-2")
    assert log == [("a", "kv-1"), ("b", "kv-1"), ("a", "expect", "kv-2"), ("b", "expect", "kv-2")]


def test_a_block_that_several_save_counts_once():
    parts = [FakeConnector("a", [], saving={1, 2, 3}), FakeConnector("b", [], saving={2, 3, 4}), FakeConnector("c", [])]
    assert MultiConnector(parts).num_saving_blocks() == 4 + 2, "the third does not tell which"


def test_each_part_is_made_as_if_it_were_configured_alone(monkeypatch):
    made = []

    def factory(context):
        made.append(context.config.connector)
        return FakeConnector("a", [])

    monkeypatch.setattr(connectors.multi.connector, "connector_factory", lambda name: factory)
    section = ConnectorSection(name="multi", connectors=("p2p", "offload"), lease_s=12.0)
    connector_factory("multi")(connector_context("prefill", connector=section))
    assert [(own.name, own.connectors, own.lease_s) for own in made] == [("p2p", (), 12.0), ("offload", (), 12.0)]


def test_two_connectors_that_make_handoffs_are_refused(monkeypatch):
    def factory(context):
        connector = FakeConnector(context.config.connector.name, [])
        connector.scheduler.makes_handoffs = connector.name != "offload"
        return connector

    monkeypatch.setattr(connectors.multi.connector, "connector_factory", lambda name: factory)
    section = ConnectorSection(name="multi", connectors=("p2p", "offload", "folder"))
    with pytest.raises(ConfigError, match="p2p and folder make handoffs") as refused:
        MultiConnector.build(connector_context("prefill", connector=section))
    assert refused.value.param == "connector.connectors"


def test_a_part_whose_factory_makes_no_connector_is_refused(monkeypatch):
    monkeypatch.setattr(connectors.multi.connector, "connector_factory", lambda name: lambda context: None)
    section = ConnectorSection(name="multi", connectors=("p2p", "offload"))
    with pytest.raises(ConfigError, match=r"connector\.connectors = 'p2p': its factory returned None") as refused:
        MultiConnector.build(connector_context("prefill", connector=section))
    assert refused.value.param == "connector.connectors"
