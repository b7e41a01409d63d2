import threading
import time

import pytest

from core.engine.thread import EngineThread
from core.errors import EngineDead
from core.request import NewRequest
from core.testing.clock import FakeClock
from core.wire.sampling import SamplingParams

DEADLINE_S = 20.0
PROMPT = list(range(10, 80))


def request(name, prompt=PROMPT, **sampling):
    return NewRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **sampling})
    )


@pytest.fixture
def start(build_tiny, make_mailbox):
    """Start a thread around an engine; it is stopped at the end."""
    threads = []

    def start(connector=None, prepare=None, **settings):
        mailbox = make_mailbox()
        engine = build_tiny(connector, **settings).engine
        engine.shutdown = lambda: None  # the fixture of the engine does it
        thread = EngineThread(engine, mailbox.on_outputs, mailbox.on_death, prepare)
        thread.start()
        threads.append(thread)
        return thread, mailbox

    yield start
    for thread in threads:
        assert thread.stop(DEADLINE_S)


def poll(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "condition never true"
        time.sleep(0.001)


def test_serves_requests_of_several_threads(start, oracle):
    thread, mailbox = start()
    submitters = [threading.Thread(target=thread.submit_add, args=([request(f"r{i}", PROMPT[i:])],)) for i in range(8)]
    for submitter in submitters:
        submitter.start()
    for submitter in submitters:
        submitter.join()
    mailbox.wait(lambda: len(mailbox.ends) == 8)
    for i in range(8):
        oracle.assert_greedy(PROMPT[i:], mailbox.tokens[f"r{i}"])
    assert not mailbox.deaths


def test_refused_request_comes_back_as_an_error_and_the_others_go_on(start):
    thread, mailbox = start()
    thread.submit_add([request("bad", [999]), request("good")])
    mailbox.wait(lambda: len(mailbox.ends) == 2)
    error = mailbox.ends["bad"].error
    assert (error.code, error.http_status, error.param) == ("invalid_request", 400, "prompt")
    assert len(mailbox.tokens["good"]) == 6


def test_a_request_that_breaks_while_it_is_added_ends_alone_and_is_logged(start, caplog):
    thread, mailbox = start()
    broken = NewRequest(request_id="bad", prompt_token_ids=PROMPT, sampling=SamplingParams(), cache_salt="\ud800")
    thread.submit_add([broken, request("good")])
    mailbox.wait(lambda: len(mailbox.ends) == 2)
    assert (mailbox.ends["bad"].error.code, mailbox.ends["bad"].error.http_status) == ("internal_error", 500)
    assert len(mailbox.tokens["good"]) == 6
    assert [record.levelname for record in caplog.records if "request_not_added" in record.message] == ["ERROR"]
    assert not mailbox.deaths


def test_nothing_can_be_submitted_after_the_order_to_stop(start):
    thread, _ = start()
    assert thread.stop(DEADLINE_S)
    assert thread.stop(DEADLINE_S)
    for submit in (lambda: thread.submit_add([request("late")]), lambda: thread.submit_abort(["late"])):
        with pytest.raises(EngineDead, match="stopped"):
            submit()


def test_stop_before_start_shuts_the_engine_down(build_tiny):
    engine, closed = build_tiny().engine, []
    engine.shutdown = lambda: closed.append(True)
    thread = EngineThread(engine, lambda _: None, lambda _: None)
    assert thread.stop(DEADLINE_S)
    assert closed == [True]
    assert not thread.is_alive()


def test_a_dying_loop_shuts_the_engine_down_after_its_death_is_told(build_tiny):
    events = []
    engine = build_tiny().engine
    engine.shutdown = lambda: events.append("shutdown")
    engine.step = lambda: 1 / 0
    thread = EngineThread(engine, lambda _: None, lambda error: events.append(type(error).__name__))
    thread.start()
    thread.submit_add([request("r")])
    poll(lambda: len(events) == 2)
    assert events == ["ZeroDivisionError", "shutdown"]
    assert thread.stop(DEADLINE_S)


def test_abort_stops_a_running_request(start):
    thread, mailbox = start()
    thread.submit_add([request("long", max_tokens=400)])
    mailbox.wait(lambda: len(mailbox.tokens.get("long", ())) > 3)
    thread.submit_abort(["long", "unknown"])
    thread.submit_add([request("next", max_tokens=2)])
    mailbox.wait(lambda: "next" in mailbox.ends)
    assert "long" not in mailbox.ends
    assert thread.stats().num_running == 0


def test_idle_engine_takes_no_steps_and_each_wakeup_gives_one(start, copy_connector):
    connector = copy_connector({"r": (64, [1, 2, 3, 4])}, hold=True)
    thread, mailbox = start(connector)
    thread.submit_add([request("r")])
    poll(lambda: thread.stats().num_loading == 1 and thread.stats().num_steps == 1)
    for number in range(5):  # a round trip through the inbox: a busy loop would have stepped meanwhile
        thread.submit_add([request(f"bad{number}", [999])])
        mailbox.wait(lambda number=number: f"bad{number}" in mailbox.ends)
        assert thread.stats().num_steps == 1
    for number in range(3):
        thread.wake()
        poll(lambda number=number: thread.stats().num_steps == 2 + number)


def test_connector_that_dies_while_nobody_asks_for_anything_ends_the_engine(start, copy_connector):
    connector = copy_connector()
    thread, mailbox = start(connector)

    def die(finished_req_ids):
        raise EngineDead("the KV transfer has died")

    connector.worker.get_transfer_results = die
    thread.wake()
    thread.wake()
    mailbox.wait(lambda: mailbox.deaths)
    assert not thread.is_alive()


def test_idle_engine_steps_once_for_a_wakeup_and_then_rests(start, copy_connector):
    thread, mailbox = start(copy_connector())
    thread.wake()
    poll(lambda: thread.stats().num_steps == 1)
    for number in range(5):  # a round trip through the inbox: a busy loop would have stepped meanwhile
        thread.submit_add([request(f"bad{number}", [999])])
        mailbox.wait(lambda number=number: f"bad{number}" in mailbox.ends)
    assert thread.stats().num_steps == 1


def test_a_step_that_hangs_shows_while_it_hangs(build_tiny, make_mailbox):
    clock, engine, mailbox = FakeClock(), build_tiny().engine, make_mailbox()
    engine.shutdown = lambda: None
    entered, release = threading.Event(), threading.Event()
    step = engine.step

    def hang():
        entered.set()
        assert release.wait(DEADLINE_S)
        return step()

    engine.step = hang
    thread = EngineThread(engine, mailbox.on_outputs, mailbox.on_death, clock=clock)
    thread.start()
    assert thread.reading().stalled_s == 0.0
    thread.submit_add([request("r", max_tokens=1)])
    assert entered.wait(DEADLINE_S)
    clock.advance(3.0)
    reading = thread.reading()
    assert (reading.stalled_s, reading.is_warming_up) == (3.0, True)
    release.set()
    mailbox.wait(lambda: "r" in mailbox.ends)
    poll(lambda: thread.reading().stalled_s == 0.0)
    assert thread.stop(DEADLINE_S)


def test_a_thread_that_hangs_between_steps_shows_too(build_tiny, make_mailbox):
    clock, engine, mailbox = FakeClock(), build_tiny().engine, make_mailbox()
    engine.shutdown = lambda: None
    entered, release = threading.Event(), threading.Event()

    def on_outputs(outputs):
        mailbox.on_outputs(outputs)
        entered.set()
        assert release.wait(DEADLINE_S)

    thread = EngineThread(engine, on_outputs, mailbox.on_death, clock=clock)
    thread.start()
    thread.submit_add([request("r", max_tokens=1)])
    assert entered.wait(DEADLINE_S)
    clock.advance(5.0)
    assert thread.reading().stalled_s == 5.0
    release.set()
    poll(lambda: thread.reading().stalled_s == 0.0)
    assert thread.stop(DEADLINE_S)
    assert thread.reading().stalled_s == 0.0


def test_death_is_told_once_and_refuses_what_comes_after(start, copy_connector):
    connector = copy_connector()
    connector.worker.raises["wait_for_save"] = RuntimeError("broken")
    thread, mailbox = start(connector)
    thread.submit_add([request("r")])
    mailbox.wait(lambda: mailbox.deaths)
    assert len(mailbox.tokens["r"]) == 1  # the step before the end was not lost
    assert [str(error) for error in mailbox.deaths] == ["broken"]
    assert not thread.is_alive()
    for submit in (lambda: thread.submit_add([request("late")]), lambda: thread.submit_abort(["r"])):
        with pytest.raises(EngineDead):
            submit()


def test_prepare_runs_on_the_engines_thread_first(start):
    names = []
    thread, mailbox = start(prepare=lambda: names.append(threading.current_thread().name))
    thread.submit_add([request("r", max_tokens=1)])
    mailbox.wait(lambda: "r" in mailbox.ends)
    assert names == ["kvferry-engine"]


def test_stop_ends_the_thread_in_the_middle_of_work_and_shuts_the_engine_down(build_tiny, make_mailbox):
    mailbox = make_mailbox()
    engine = build_tiny().engine
    closed = []
    engine.shutdown = lambda: closed.append(threading.current_thread().name)
    thread = EngineThread(engine, mailbox.on_outputs, mailbox.on_death)
    thread.start()
    thread.submit_add([request("r", max_tokens=400)])
    mailbox.wait(lambda: mailbox.tokens)
    assert thread.stop(DEADLINE_S)
    assert closed == ["kvferry-engine"]
    assert not thread.is_alive()
    assert not mailbox.deaths
