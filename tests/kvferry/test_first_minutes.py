"""A newcomer's mistake is explained in one line that names the setting and the fix, before any process starts."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from core.config import load_config
from core.errors import ConfigError
from core.process_signals import SIGNALS
from kvferry import cli
from kvferry.cluster_plan import workers_here
from kvferry.connector_preflight import check_connectors
from kvferry.preflight import check_process
from kvferry.processes import ProcessKeeper

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TIMEOUT_S = 60  # of a real process on a machine that does other things as well


def load_mistakes():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("mistakes")
    finally:
        sys.path.remove(str(BENCHMARKS))


mistakes = load_mistakes()
AS_PROCESSES = ("unknown flag", "longer than the model", "API port in use", "cache folder below a file", "drain of nothing")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with mistakes.surroundings(tmp_path_factory.mktemp("mistakes")) as found:
        yield found


@pytest.fixture
def process(monkeypatch):
    """Put the handlers of signals back as they were; collect what would have been started."""
    started = []
    monkeypatch.setattr(ProcessKeeper, "start", lambda _keeper, spec: started.append(spec.name))
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **_: started.append(arguments))
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield started
    for number, handler in handlers.items():
        signal.signal(number, handler)


def assert_told(mistake, found, exit_code, errors):
    line = errors.splitlines()[-1]
    assert re.search(found.fill(mistake.last_line, is_pattern=True), line)
    assert line.startswith("kvferry: ")
    assert exit_code == mistake.exit_code
    assert "Traceback" not in errors


@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_mistake_is_the_last_line_and_nothing_has_started(mistake, found, process, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvferry", *map(found.fill, mistake.arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert_told(mistake, found, end.value.code, capsys.readouterr().err)
    assert process == []


def test_there_are_thirty_mistakes_and_no_two_alike():
    assert len({mistake.name for mistake in mistakes.MISTAKES}) == len(mistakes.MISTAKES) >= 30
    assert len({mistake.arguments for mistake in mistakes.MISTAKES}) == len(mistakes.MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_PROCESSES)
def test_the_command_itself_ends_with_that_line(name, found):
    (mistake,) = (mistake for mistake in mistakes.MISTAKES if mistake.name == name)
    command = [sys.executable, "-P", "-m", "kvferry", *map(found.fill, mistake.arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert_told(mistake, found, result.returncode, result.stderr)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("hidden", "assignments", "hint"),
    [
        ("nixl", ["connector.transports=nixl"], r"connector\.transports = nixl: the library is not installed: pip install"),
        (
            "redis",
            ["local.kvstore=true", "kvstore.redis_url=redis://127.0.0.1:6379/0"],
            r"kvstore\.redis_url: the redis library is not installed: pip install 'kvferry\[redis\]'",
        ),
        ("opentelemetry", ["tracing.endpoint=http://127.0.0.1:4318"], r"tracing\.endpoint: OpenTelemetry is not installed"),
    ],
)
def test_library_that_is_not_installed_is_named_with_its_command(hidden, assignments, hint, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name.startswith(hidden) else find_spec(name, *rest)
    )
    config = load_config(assignments=assignments)
    with pytest.raises(ConfigError, match=hint):
        check_connectors(config, workers_here(config), are_all=True)


def test_a_router_serves_models_that_only_its_workers_know(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    config = load_config(
        assignments=[f"model.name={tmp_path}", "router.port=0", "router.worker_address=tcp://127.0.0.1:0", "worker.ops_port=0"]
    )
    check_process("router", config)
    with pytest.raises(ConfigError, match="model_type 'mixtral' is not supported"):
        check_process("decode", config)
