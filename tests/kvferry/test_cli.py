"""The command line: what it refuses, what it prints, and what it does not import."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import zmq
from typer.testing import CliRunner

from kvferry import __version__, cli
from kvferry.models import is_cached

pytestmark = pytest.mark.slow


def kvferry(*arguments):
    command = [sys.executable, "-P", "-m", "kvferry", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_is_printed(argument):
    result = CliRunner().invoke(cli.app, [argument])
    assert (result.exit_code, result.stdout.strip()) == (0, __version__)


@pytest.mark.parametrize("command", ["serve", "router", "encode", "prefill", "decode", "kvstore", "demo", "models"])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "--set" in result.stdout
    assert "--ready-fd" not in result.stdout


@pytest.mark.parametrize("command", ["serve", "router", "encode", "prefill", "decode"])
def test_every_process_of_a_cluster_can_be_told_the_served_name(command, monkeypatch):
    seen = []
    monkeypatch.setattr("kvferry.serve.serve_forever", lambda config: seen.append(config) or 0)
    monkeypatch.setattr("kvferry.roles.run_role", lambda _role, config, *_rest: seen.append(config) or 0)
    result = CliRunner().invoke(cli.app, [command, "--served-model-name", "my-model"])
    assert result.exit_code == 0, result.output
    assert [config.model.served_name for config in seen] == ["my-model"]


def test_serve_takes_the_model_s_length_and_dtype_and_the_clients_key(monkeypatch):
    seen = []
    monkeypatch.setattr("kvferry.serve.serve_forever", lambda config: seen.append(config) or 0)
    flags = ["--max-model-len", "1Ki", "--dtype", "bfloat16", "--api-key", "007"]
    assert CliRunner().invoke(cli.app, ["serve", *flags]).exit_code == 0
    assert [(c.model.max_model_len, c.model.dtype, c.router.api_key) for c in seen] == [(1024, "bfloat16", "007")]


def test_help_of_serve_tells_the_defaults():
    text = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    defaults = ("smollm2-135m", "127.0.0.1", "8000", "shm tcp", "$KVFERRY_API_KEY, or none", "INFO")
    assert [value for value in defaults if f"[default: ({value})]" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["serve", "--set", "cache.blok_size=16"], "did you mean cache.block_size?"),
        (["router", "--port", "99999"], "router.port = '99999': expected a whole number, at least 0 and at most 65535"),
        (["prefill", "--log-level", "loud"], "expected one of: DEBUG, INFO, WARNING, ERROR"),
        (["decode", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["router", "--config", "a.yaml", "--config", "b.yaml"], "--config is given 2 times, a.yaml and b.yaml: give one file"),
        (["serve", "--dtype", "int3"], "model.dtype = 'int3': "),
        (["serve", "--prefill", "0"], "at least one of each is needed"),
        (["prefill", "--model", "no-such-model", "--set", "connector.name=x"], "connector.name = 'x': no such connector"),
        (["serve", "--set", "ec_connector.name=x"], "ec_connector.name = 'x': no such connector; known: p2p, shared"),
    ],
)
def test_wrong_setting_is_one_clear_line_and_exit_code_2(arguments, hint):
    result = kvferry(*arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvferry: ")
    assert hint in line


def test_settings_are_read_from_standard_input():
    command = [sys.executable, "-P", "-m", "kvferry", "router", "--config", "/dev/stdin"]
    result = subprocess.run(command, input='{"router": {"port": -1}}', capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "router.port" in result.stderr


@pytest.mark.parametrize("limit", [8, 12, 16])
def test_process_that_finds_too_few_descriptors_names_the_limit(limit):
    """At its start it needs one after the other: wherever they end, one line says so."""
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}));"
        "sys.argv[1:] = ['router', '--port', '0', '--set', 'router.worker_address=tcp://127.0.0.1:0'];"
        "from kvferry.__main__ import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("kvferry: Too many open files: raise the limit of open files (`ulimit -n`)"), result.stderr
    assert "process_bug" not in result.stderr


@pytest.mark.parametrize("kind", [OSError, zmq.ZMQError])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO])
def test_error_of_any_call_that_finds_no_descriptor_is_one_line(monkeypatch, capsys, kind, number):
    def fail(**_options):
        raise kind(number, os.strerror(number))

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(kind if number == errno.EIO else SystemExit) as end:
        cli.main()
    if number != errno.EIO:
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        own, common = "raise the limit of open files (`ulimit -n`)", "all processes together have too many"
        fix = own if number == errno.EMFILE else common
        assert line.startswith(f"kvferry: {os.strerror(number)}: {fix}")


def test_unknown_option_is_exit_code_2():
    assert kvferry("serve", "--prefil", "2").returncode == 2


def test_supervisor_router_and_help_start_without_torch():
    script = (
        "import sys; import kvferry.cli, kvferry.serve, kvferry.local, kvferry.demo, kvferry.models, router.main;"
        "sys.exit(','.join(name for name in ('torch', 'transformers', 'nixl') if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.stderr.strip() == ""


def test_models_are_listed_with_their_state(tmp_path):
    result = CliRunner().invoke(cli.app, ["models", "--set", f"model.cache_dir={tmp_path}"])
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("smollm2-135m")]
    assert "not cached" in line


def test_model_counts_as_cached_only_with_the_wanted_content(tmp_path):
    (tmp_path / "models" / "smollm2-135m-000000000000-v1").mkdir(parents=True)
    assert not is_cached("smollm2-135m", str(tmp_path))
    (tmp_path / "models" / "smollm2-135m-bcc81830d10c-v2").mkdir(parents=True)
    assert is_cached("smollm2-135m", str(tmp_path))


def test_model_is_fetched_by_name():
    result = CliRunner().invoke(cli.app, ["models", "smollm2-135m"])
    assert result.exit_code == 0
    assert result.stdout.startswith("smollm2-135m: ")
    assert "MB of weights" in result.stdout
