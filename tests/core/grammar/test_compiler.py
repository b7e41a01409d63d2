from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import threading
from contextlib import ExitStack

import pytest

from core.errors import InvalidRequest, KVFerryError, OutOfResources, Overloaded
from core.grammar import checker as checker_module
from core.grammar import compiler as compiler_module
from core.grammar.checker import GrammarChecker
from core.grammar.child import memory_bytes
from core.grammar.compiled import CompiledGrammar
from core.grammar.compiler import GrammarCompiler
from core.wire.messages import ErrorInfo
from core.wire.sampling import FORM_FIELD, StructuredOutput

# Each pattern is small; their intersection has 2**20 states.
EXPLODES = StructuredOutput(
    kind="json_schema",
    value=json.dumps({"allOf": [{"type": "string", "pattern": f".*{chr(97 + number)}.*"} for number in range(20)]}),
)


def regex(pattern):
    return StructuredOutput(kind="regex", value=pattern)


@pytest.fixture
def checker(setup):
    checker = GrammarChecker(lambda: setup, timeout_s=1.0)
    yield checker
    checker.close()


def check_one_that_explodes(checker):
    """Have it found too complex, again if the machine is so busy that it got less than its CPU time."""
    is_known = False
    while not is_known:
        with contextlib.suppress(Overloaded):
            with pytest.raises(InvalidRequest, match="too complex"):
                checker.check(EXPLODES)
            is_known = True


@pytest.fixture
def open_descriptors():
    """Have 1,100 descriptors open, as a router with so many connections has."""
    num_descriptors = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * num_descriptors), hard))
    with ExitStack() as stack:
        for _ in range(num_descriptors):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def compiler(setup):
    compiler = GrammarCompiler(lambda: setup)
    yield compiler
    compiler.close()


def compiled(compiler, *outputs):
    """Request grammars and return their ends, by form."""
    done = threading.Semaphore(0)
    compiler.set_wakeup(done.release)
    for output in outputs:
        compiler.request(output)
    found = []
    while len(found) < len(outputs):
        assert done.acquire(timeout=60)
        found += compiler.take_compiled()
    return {one.output: one.result for one in found}


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_grammar_that_takes_too_long_is_refused_and_its_process_killed(checker):
    checker.check(regex("ab"))
    pid = checker.pid
    check_one_that_explodes(checker)
    assert is_gone(pid)
    checker.check(regex("abc"))
    assert checker.pid != pid


@pytest.mark.slow
def test_a_grammar_that_comes_again_costs_nothing(checker):
    check_one_that_explodes(checker)
    assert checker.pid is None
    with pytest.raises(InvalidRequest, match="too complex"):
        checker.check(EXPLODES)
    assert checker.pid is None  # it did not start again


@pytest.mark.slow
def test_a_process_that_died_is_replaced(checker):
    checker.check(regex("ab"))
    os.kill(checker.pid, 9)
    checker.check(regex("ac"))


@pytest.mark.slow
def test_a_check_that_was_only_slow_says_nothing_about_the_grammar(setup):
    checker = GrammarChecker(lambda: setup, timeout_s=0.2)
    checker.check(regex("ab"))
    os.kill(checker.pid, signal.SIGSTOP)
    with pytest.raises(Overloaded, match="busy"):
        checker.check(regex("ac"))
    checker.check(regex("ac"))
    checker.close()


@pytest.mark.slow
def test_a_process_that_is_killed_again_and_again_says_nothing_about_the_grammar(checker, monkeypatch):
    exchange = GrammarChecker._exchange

    def kill(self, process, question, timeout_s):
        if question.output == regex("ac"):
            process.kill()  # as the kernel does for want of memory
        return exchange(self, process, question, timeout_s)

    monkeypatch.setattr(GrammarChecker, "_exchange", kill)
    with pytest.raises(Overloaded):
        checker.check(regex("ac"))
    monkeypatch.undo()
    checker.check(regex("ac"))


@pytest.mark.slow
def test_a_process_that_ends_for_want_of_its_own_memory_speaks_of_that(checker, monkeypatch):
    exchange = GrammarChecker._exchange

    def abort(self, process, question, timeout_s):
        if question.output == regex("ac"):
            process.send_signal(signal.SIGABRT)  # as a library does that gets no memory
        return exchange(self, process, question, timeout_s)

    monkeypatch.setattr(GrammarChecker, "_exchange", abort)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="within the memory allowed"):
            checker.check(regex("ac"))
        monkeypatch.undo()  # the answer is kept


@pytest.mark.usefixtures("open_descriptors")
def test_checks_grammars_however_many_descriptors_are_open(checker):
    checker.check(regex("ab"))
    with pytest.raises(InvalidRequest, match="not supported"):
        checker.check(regex("(?=a)"))


@pytest.mark.slow
def test_an_answer_that_was_not_read_is_not_taken_for_the_next(checker, monkeypatch):
    def fail(stream):
        monkeypatch.undo()
        raise ValueError("not now")

    checker.check(regex("ab"))
    monkeypatch.setattr(checker_module, "read_frame", fail)
    with pytest.raises(ValueError, match="not now"):
        checker.check(regex("ac"))
    with pytest.raises(InvalidRequest, match="not supported"):
        checker.check(regex("(?=a)"))


def test_without_its_vocabulary_the_process_does_not_stay():
    def setup():
        raise ValueError("no such tokenizer")

    checker = GrammarChecker(setup)
    with pytest.raises(ValueError, match="no such tokenizer"):
        checker.check(regex("ab"))
    assert checker.pid is None


@pytest.fixture
def start_nothing(monkeypatch):
    """Have each start of a process fail."""

    def start_nothing(number):
        def start(*_args, **_options):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(subprocess, "Popen", start)

    return start_nothing


@pytest.mark.parametrize("lack", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_lack_that_keeps_the_process_from_starting_is_named_and_may_pass(
    checker, compiler, start_nothing, monkeypatch, caplog, lack
):
    start_nothing(lack)
    for _ in range(2):
        with pytest.raises(OutOfResources, match=f"does not start: {os.strerror(lack)}: try again later") as refused:
            checker.check(regex("ab"))
    info = ErrorInfo.of(refused.value)
    assert (info.code, info.http_status, info.retryable) == ("overloaded", 503, True)
    assert len([record for record in caplog.records if "event=grammar_check_not_started" in record.message]) == 1
    here_alone = ErrorInfo.of(compiled(compiler, regex("ab"))[regex("ab")])
    assert (here_alone.code, here_alone.param) == ("overloaded", FORM_FIELD)  # as of a worker that others stand in for
    monkeypatch.undo()
    checker.check(regex("ab"))


def test_a_process_that_can_never_start_is_an_error_of_ours(checker, start_nothing):
    start_nothing(errno.ENOENT)
    with pytest.raises(KVFerryError, match="does not start: No such file") as failed:
        checker.check(regex("ab"))
    assert not failed.value.retryable


def test_closing_ends_the_process(checker):
    checker.check(regex("ab"))
    pid = checker.pid
    checker.close()
    assert is_gone(pid)
    with pytest.raises(KVFerryError, match="stopped"):
        checker.check(regex("ad"))


def test_compiles_each_grammar_once_and_keeps_it(compiler):
    assert compiler.get(regex("ab")) is None
    compiler.request(regex("ab"))
    found = compiled(compiler, regex("ab"))
    assert isinstance(found[regex("ab")], CompiledGrammar)
    assert compiler.get(regex("ab")) is found[regex("ab")]
    assert compiler.take_compiled() == []


def test_reports_why_a_grammar_cannot_be_had(compiler):
    found = compiled(compiler, regex("(?=a)"), regex("a"))
    assert isinstance(found[regex("(?=a)")], InvalidRequest)
    assert compiler.get(regex("(?=a)")) is None
    assert isinstance(found[regex("a")], CompiledGrammar)


def test_a_setup_that_fails_ends_in_an_error():
    def setup():
        raise OSError("no such tokenizer")

    compiler = GrammarCompiler(setup)
    error = compiled(compiler, regex("a"))[regex("a")]
    compiler.close()
    assert "no such tokenizer" in error.message


def test_evicts_the_least_recently_used_grammar_beyond_its_bytes(setup):
    compiler = GrammarCompiler(lambda: setup, cache_bytes=3 * 100_000)
    for pattern in ("a", "b"):
        compiled(compiler, regex(pattern))
    assert compiler.get(regex("a")) is not None
    compiled(compiler, regex("c"))
    compiler.close()
    assert compiler.get(regex("b")) is None
    assert compiler.get(regex("a")) is not None
    assert compiler.num_bytes <= 3 * 100_000


def test_a_grammar_whose_states_are_full_is_compiled_again(compiler):
    grammar = compiled(compiler, regex("a"))[regex("a")]
    grammar.is_broken = True
    assert compiler.get(regex("a")) is None


@pytest.mark.slow
def test_a_grammar_for_one_request_is_not_kept(compiler):
    done = threading.Semaphore(0)
    compiler.set_wakeup(done.release)
    compiler.renew(regex("a"), "r")
    compiler.renew(regex("a"), "r")
    assert done.acquire(timeout=60)
    (found,) = compiler.take_compiled()
    assert found.owner == "r"
    assert compiler.get(regex("a")) is None
    shared = compiled(compiler, regex("a"))[regex("a")]
    assert compiler.get(regex("a")) is shared is not found.result


def test_grammars_for_requests_that_have_begun_are_never_too_many(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_PENDING", 1)
    compiler.request(regex("a"))
    compiler.renew(regex("b"))
    compiler.renew(regex("b"), "r")
    with pytest.raises(Overloaded):
        compiler.request(regex("c"))


def test_too_many_waiting_grammars_are_refused(compiler, monkeypatch):
    monkeypatch.setattr(compiler_module, "MAX_PENDING", 2)
    compiler.request(regex("a"))
    compiler.request(regex("b"))
    compiler.request(regex("b"))
    with pytest.raises(Overloaded) as refused:
        compiler.request(regex("c"))
    assert refused.value.param == "structured_outputs", "others may be admitted"


def test_a_grammar_that_could_not_be_checked_in_time_is_named_as_a_field(compiler, monkeypatch):
    def be_busy(self, output):
        raise Overloaded("the machine is busy")

    monkeypatch.setattr(GrammarChecker, "check", be_busy)
    error = compiled(compiler, regex("a"))[regex("a")]
    assert (error.code, error.param) == (Overloaded.code, "structured_outputs")


class HeldCompiler(GrammarCompiler):
    """Compiles nothing; the thread waits for ``go`` at the first grammar."""

    def __init__(self):
        super().__init__(lambda: None)
        self.has_begun = threading.Event()
        self.go = threading.Event()
        self.seen = []

    def _compile(self, output):
        self.seen.append(output.value)
        self.has_begun.set()
        assert self.go.wait(30)
        raise KVFerryError("none")


@pytest.fixture
def held():
    held = HeldCompiler()
    held.request(regex("first"))
    assert held.has_begun.wait(30)
    yield held
    held.go.set()
    held.close()


def collect(held, count):
    """Let the thread go on, and return the ends of this many grammars."""
    done = threading.Semaphore(0)
    held.set_wakeup(done.release)
    held.go.set()
    for _ in range(count):
        assert done.acquire(timeout=30)
    return held.take_compiled()


def test_grammars_for_one_request_leave_room_for_others(held):
    for number in range(2 * compiler_module.MAX_PENDING):
        held.renew(regex("own"), f"r{number}")
    held.request(regex("other"))
    held.request(regex("another"))
    collect(held, 5)
    assert held.seen[:5] == ["first", "own", "other", "own", "another"]


def test_grammars_for_requests_that_have_ended_are_not_compiled(held):
    for number in range(40):
        held.renew(regex("own"), f"r{number}")
    held.abandon({f"r{number}" for number in range(40) if number != 7})
    held.request(regex("other"))
    assert {(one.output.value, one.owner) for one in collect(held, 3)} == {("first", ""), ("own", "r7"), ("other", "")}
    assert held.seen.count("own") == 1


@pytest.mark.parametrize("status", [1, -signal.SIGSEGV, -signal.SIGILL])
def test_a_crash_is_not_put_down_to_memory(status, monkeypatch):
    monkeypatch.setattr(GrammarChecker, "_try", lambda self, output: status)
    checker = GrammarChecker(lambda: None)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="ends the process") as refused:
            checker.check(regex("a"))
        assert "memory" not in refused.value.message


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max", 2 << 30), (str(64 << 30), 2 << 30), (str(2 << 30), 1 << 30), (str(256 << 20), 512 << 20)],
)
def test_the_memory_of_a_grammar_follows_the_container(tmp_path, limit, expected):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    assert memory_bytes(str(tmp_path / "memory.max")) == expected
    assert memory_bytes(str(tmp_path / "none")) == 2 << 30
