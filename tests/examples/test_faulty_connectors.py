"""The suite of connectors finds faults of which nothing else tells: each in a copy of the example, by one test of the suite."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from connectors.reports import LoadEnded, SendingEnded
from connectors.testing.connector_pair import LAYOUT, PROMPT, UNTOUCHED
from connectors.testing.connector_suite import ConnectorConformance
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection
from core.errors import EngineDead

pytestmark = pytest.mark.slow


class Suite(ConnectorConformance):
    """The suite of the example, with a fault in both connectors; not collected by itself."""

    holds_until_read = False

    def __init__(self, module, folder, fault):
        self.module, self.folder, self.fault = module, folder, fault

    def make_connector(self, role, patience_s):
        section = ConnectorSection(name="folder", transfer_deadline_s=patience_s, extra={"folder": str(self.folder)})
        connector = self.module.FolderConnector(connector_context(role, connector=section))
        self.fault(connector)
        return connector

    def damage(self, pair, handoff, position):
        path = self.module.file_of(self.folder, handoff.transfer_id)
        content = bytearray(path.read_bytes())
        content[position * LAYOUT.block_bytes + 200] ^= 1
        path.write_bytes(content)


def replace(target, name, make):
    """Replace a method; the new one gets the old one first."""
    old = getattr(target, name)
    setattr(target, name, lambda *arguments: make(old, *arguments))


def replace_of_blocks(connector, name, make):
    """Replace a method of the access to the pool, which is there from the start of the thread on."""

    def start(old):
        old()
        replace(connector.worker.blocks, name, make)

    replace(connector.worker, "start", start)


def frees_blocks_before_it_copies_them(connector):
    """The copy follows in the step after the one that has freed the blocks."""
    worker, scheduler = connector.worker, connector.scheduler
    early, late, due = set(), {}, []

    def save(old, order):
        late[order.request_id] = lambda: old(order)
        worker.report(SendingEnded(order.request_id))

    def report(old, ended):
        if isinstance(ended, SendingEnded) and ended.request_id in early:
            return
        early.add(ended.request_id)
        old(ended)

    def on_output(old, output):
        due.extend(late.pop(request_id) for request_id in output.finished_sending)
        old(output)

    def build(old, step):
        while due:
            due.pop()()
        return old(step)

    replace(worker, "_save", save)
    replace(worker, "report", report)
    replace(scheduler, "update_connector_output", on_output)
    replace(scheduler, "build_connector_meta", build)


def keeps_bytes_by_block(connector):
    kept = {}
    replace_of_blocks(connector, "read", lambda old, ids: [kept.setdefault(ids[0], bytes(old(ids)[0]))])


def keeps_views_over_the_next_read(connector):
    def read(old, ids):
        views = old(ids)
        old([1])
        return views

    replace_of_blocks(connector, "read", read)


def does_not_finish_writes(connector):
    replace_of_blocks(connector, "finish_writes", lambda old: None)


def uses_what_is_damaged(connector):
    replace(connector.worker, "_read", lambda old, load: old(load) and ())


def ignores_the_dtype(connector):
    def check(old, request, handoff):
        layout = msgspec.structs.replace(handoff.layout, dtype=LAYOUT.dtype)
        return old(request, msgspec.structs.replace(handoff, layout=layout))

    replace(connector.scheduler, "_check_offer", check)


def writes_after_the_end_of_an_abort(connector):
    worker, aborted = connector.worker, []

    def carry_out(old, order):
        if isinstance(order, str) and order in worker._waiting:
            aborted.append(worker._waiting.pop(order)[1])
            worker.report(LoadEnded(order, None))
        else:
            old(order)

    def poll(old):
        for load in list(aborted):
            with suppress(FileNotFoundError):
                worker._read(load)
                aborted.remove(load)
        return old()

    replace(worker, "carry_out", carry_out)
    replace(worker, "poll", poll)


def cannot_release(connector):
    connector.release = lambda: None  # takes no ids


def waits_where_it_must_not(connector):
    connector.expect = lambda handoff: time.sleep(0)


FAULTS = [
    (frees_blocks_before_it_copies_them, "test_blocks_are_kept_until_they_are_read", "host"),
    (keeps_bytes_by_block, "test_blocks_are_used_again_for_other_prompts", "host"),
    (keeps_views_over_the_next_read, "test_blocks_are_used_again_for_other_prompts", "device"),
    (does_not_finish_writes, "test_blocks_are_used_again_for_other_prompts", "device"),
    (writes_after_the_end_of_an_abort, "test_nothing_writes_the_blocks_of_a_load_after_the_end_of_its_abort", "host"),
    (cannot_release, "test_a_handoff_that_is_released_ends", "host"),
    (waits_where_it_must_not, "test_no_call_waits", "host"),
]


@pytest.fixture
def suite(folder_connector, tmp_path):
    return lambda fault: Suite(folder_connector, tmp_path / "kv", fault)


async def fails(suite, test, memory="host", *arguments):
    async with suite.started_pair(beside_device=memory == "device") as pair:
        with pytest.raises((AssertionError, TypeError)) as caught:
            await getattr(suite, test)(pair, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(("fault", "test", "memory"), FAULTS, ids=[fault.__name__ for fault, *_ in FAULTS])
async def test_the_suite_finds_the_fault(suite, fault, test, memory):
    await fails(suite(fault), test, memory)


async def test_the_suite_finds_that_damage_is_used(suite):
    message = await fails(suite(uses_what_is_damaged), "test_a_byte_that_has_changed_is_never_used", "host", 0)
    assert "the load used a byte that damage has changed in block 0: block 0 of a is wrong" in message


async def test_a_producer_that_holds_its_blocks_has_heard_of_them_before_one_is_damaged(suite):
    """It may make its digests only then."""
    one = suite(lambda connector: None)
    one.holds_until_read = True

    def damage(pair, handoff, position):
        assert not pair.producer.connector.scheduler.has_pending_push_work()
        raise LookupError("enough")

    one.damage = damage
    async with one.started_pair() as pair:
        with pytest.raises(LookupError, match="enough"):
            await one.test_a_byte_that_has_changed_is_never_used(pair, 0)


async def test_the_suite_finds_that_a_dtype_is_ignored(suite):
    await fails(suite(ignores_the_dtype), "test_a_handoff_of_something_else_is_refused_and_released", "host", "dtype")


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        ("test_nothing_writes_the_blocks_of_a_load_after_the_end_of_its_abort", ()),
        ("test_blocks_of_a_load_are_in_quarantine_or_never_written_again", ()),
        ("test_abort_while_loading_leaves_nothing", ("first bytes",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_suite_aborts_loads_whose_bytes_are_coming(suite, test, arguments):
    """A load whose producer has not even heard of it shows nothing of how its bytes end."""
    one, num_moving = suite(lambda connector: None), 0
    async with one.started_pair() as pair:

        def abort(old, request):
            nonlocal num_moving
            rows = pair.consumer.engine.pool.rows[pair.consumer.block_ids(request)]
            has_orders = not pair.producer.connector.scheduler.has_pending_push_work()
            num_moving += has_orders and not ((rows == UNTOUCHED).all() or (rows == rows[0, 0]).all())
            old(request)

        replace(pair.consumer.engine, "abort", abort)
        await getattr(one, test)(pair, *arguments)
    assert num_moving


async def test_an_error_on_the_producers_thread_is_shown_with_its_line(suite):
    def cannot_save(connector):
        connector.worker._save = lambda save: {}["a name of the author's"]

    async with suite(cannot_save).started_pair() as pair:
        replace(pair.consumer.engine, "until", lambda old, condition: old(condition, 0.2))
        pair.load("a", PROMPT, pair.producer.engine.prefill("a", PROMPT))
        with pytest.raises(EngineDead, match="a name of the author's") as caught:
            await pair.ended("a")
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is not None


async def test_the_suite_demands_a_way_to_damage_bytes_that_lie_between_the_workers(suite):
    one = suite(lambda connector: None)
    one.damage = lambda pair, handoff, position: ConnectorConformance.damage(one, pair, handoff, position)
    async with one.started_pair() as pair:
        with pytest.raises(NotImplementedError, match="override damage, or set can_be_damaged"):
            await one.test_a_byte_that_has_changed_is_never_used(pair, 0)


@pytest.mark.parametrize(("holds", "text"), [(True, "if something does"), (False, "not tested: override lose_backend")])
async def test_a_skip_says_when_a_backend_must_be_lost(suite, holds, text):
    one = suite(lambda connector: None)
    one.holds_until_read = holds
    with pytest.raises(pytest.skip.Exception, match=text):
        await one.lose_backend(None)


async def test_the_suite_finds_a_thread_that_is_left(suite):
    left = []

    def leaves_its_thread(connector):
        async def stop():
            left.append(connector.worker)

        connector.stop = stop

    with pytest.raises(AssertionError, match="kv-folder"):
        await suite(leaves_its_thread).test_stop_leaves_no_thread_and_no_open_file()
    for worker in left:
        await worker.stop()


async def test_the_suite_finds_a_task_that_is_left(suite):
    left = []

    def leaves_a_task(connector):
        async def start(old):
            await old()
            left.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))

        replace(connector, "start", start)

    with pytest.raises(AssertionError, match=r"leaves the tasks .*forgotten"):
        await suite(leaves_a_task).test_stop_leaves_no_thread_and_no_open_file()
    for task in left:
        task.cancel()


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="the system does not list children")
async def test_the_suite_finds_a_process_that_is_left(suite):
    left = []

    def begin():
        left.append(subprocess.Popen(["sleep", "60"]))

    def leaves_a_process(connector):
        async def start(old):
            await old()
            begin()

        replace(connector, "start", start)

    try:
        with pytest.raises(AssertionError, match=r"leaves the processes .*sleep"):
            await suite(leaves_a_process).test_stop_leaves_no_thread_and_no_open_file()
    finally:
        for process in left:
            process.kill()
            process.wait()
