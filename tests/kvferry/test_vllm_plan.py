"""A local cluster with vLLM engines: what it starts for each worker, and what it refuses before it starts anything."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import msgspec
import pytest

from connectors.vllm.engine import SUPPORTED_MINORS
from connectors.vllm.settings import read_keys, read_settings
from core.config import load_config
from core.errors import ConfigError
from core.model.hub import resolve_model
from kvferry import LocalCluster, vllm_preflight
from kvferry.foreign import ForeignProgram
from kvferry.local import ProcessOptions
from kvferry.machine import visible_gpus
from kvferry.vllm_plan import plan_servers

VERSIONS = {"vllm": "0.32.0", "kvferry-vllm": "0.1.0"}
ENGINES = ("prefill-0", "decode-0")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_API_KEY", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that writes a vLLM whose environment has these packages; it returns the path of its command."""
    monkeypatch.setattr(vllm_preflight, "resolve_model", lambda *_, **__: SimpleNamespace(path=tmp_path / "model"))

    def write(first_lines="#!{python}\n", **versions):
        python, program = tmp_path / "python3", tmp_path / "vllm"
        found = VERSIONS | {name.replace("_", "-"): version for name, version in versions.items()}
        for path, text in ((python, f"#!/bin/sh\necho '{json.dumps(found)}'\n"), (program, first_lines.format(python=python))):
            path.write_text(text)
            path.chmod(0o755)
        return str(program)

    return write


def cluster_of(command, *assignments, **options):
    fixed = ["local.engine=vllm", f"local.vllm_command={command}", "router.port=0"]
    return LocalCluster(load_config(assignments=[*fixed, *assignments]), options=ProcessOptions(**options))


def prepared(command, *assignments, **options):
    cluster = cluster_of(command, *assignments, **options)
    cluster.prepare()
    return cluster


def refusal(command, *assignments):
    with pytest.raises(ConfigError) as refused:
        prepared(command, *assignments)
    assert "\n" not in refused.value.message
    return refused.value


def program_of(cluster, worker):
    return msgspec.json.decode(cluster._spec(f"{worker}-vllm").read_input(), type=ForeignProgram)


def options_of(cluster, worker):
    """Return the options of a server with their values."""
    words = program_of(cluster, worker).command
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def transfer_config(cluster, worker):
    return json.loads(options_of(cluster, worker)["--kv-transfer-config"])


# ---- what is started -------------------------------------------------------------------------------------------------------


def test_each_worker_is_an_agent_with_a_server_of_its_own(install):
    cluster = prepared(install(), "local.num_decode=2")
    assert cluster._names == (
        *("router", "prefill-0-vllm", "decode-0-vllm", "decode-1-vllm", "prefill-0", "decode-0", "decode-1"),
    )
    for worker in ("prefill-0", "decode-0", "decode-1"):
        spec = cluster._spec(worker)
        assert spec.command[-5:-2] == ["agent", "--role", worker.partition("-")[0]]
        address = json.loads(spec.read_input())["agent"]["engine"]
        assert address == program_of(cluster, worker).http_address
        assert options_of(cluster, worker)["--port"] == address.rpartition(":")[2]


def test_a_server_listens_on_loopback_and_takes_tokens_under_the_served_name(install, tmp_path):
    command = install()
    cluster = prepared(command, "model.served_name=mine", "model.max_model_len=512", "model.dtype=bfloat16")
    assert program_of(cluster, "decode-0").command[:3] == (command, "serve", str(tmp_path / "model"))
    options = options_of(cluster, "decode-0")
    assert options["--host"] == "127.0.0.1"
    assert options["--served-model-name"] == "mine"
    assert options["--max-model-len"] == "512"
    assert options["--dtype"] == "bfloat16"
    assert {"--enable-scale-out", "--enable-prompt-tokens-details"} <= options.keys()


def test_the_users_arguments_come_last(install):
    cluster = prepared(install(), "local.vllm_arguments=--tensor-parallel-size 2 --override '{\"a\": 1}'")
    assert program_of(cluster, "prefill-0").command[-4:] == ("--tensor-parallel-size", "2", "--override", '{"a": 1}')


def test_the_plug_in_understands_its_settings(install):
    cluster = prepared(install(), "connector.lease_s=9", "connector.transports=[shm,nixl,tcp]", "connector.kv_verify=digest")
    for worker in ENGINES:
        config = transfer_config(cluster, worker)
        assert (config["kv_connector"], config["kv_role"]) == ("KvferryConnector", "kv_both")
        assert config["kv_load_failure_policy"] == "recompute"
        settings = read_settings(config["kv_connector_extra_config"])
        assert (settings.transports, settings.lease_s, settings.kv_verify) == (("nixl", "tcp"), 9, "digest")
        assert settings.bind_host(has_key=False, own_address="10.0.0.1") == "127.0.0.1"
        assert settings.peer_rules(has_key=True).refusal("tcp://127.0.0.1:7000") is None


def test_each_server_publishes_kv_events_to_its_own_agent(install):
    cluster = prepared(install())
    addresses = set()
    for worker in ENGINES:
        events = json.loads(options_of(cluster, worker)["--kv-events-config"])
        agent = json.loads(cluster._spec(worker).read_input())["agent"]
        assert events["enable_kv_cache_events"]
        assert agent["kv_events_address"] == events["endpoint"]
        assert agent["kv_events_replay_address"] == events["replay_endpoint"]
        assert events["endpoint"].startswith("ipc://@"), "vLLM binds it, and no other machine reaches it"
        addresses |= {events["endpoint"], events["replay_endpoint"]}
    assert len(addresses) == 2 * len(ENGINES)


@pytest.mark.parametrize(
    "setting",
    [
        "router.routing=least_loaded",
        "local.vllm_arguments=--kv-events-config {}",
        "local.vllm_arguments=--kv_events_config={}",
        "local.vllm_arguments=--data-parallel-size 2",
    ],
)
def test_events_that_nobody_uses_or_the_user_chose_are_not_set_up(install, setting):
    cluster = prepared(install(), setting)
    assert json.loads(cluster._spec("decode-0").read_input())["agent"].get("kv_events_address", "") == ""
    assert '"endpoint"' not in options_of(cluster, "decode-0").get("--kv-events-config", "")


def test_no_two_servers_share_a_port(install):
    cluster = prepared(install(), "local.num_prefill=3", "local.num_decode=3")
    ports = []
    for worker in cluster._roles:
        control = transfer_config(cluster, worker)["kv_connector_extra_config"]["kvferry.port"]
        ports += [int(options_of(cluster, worker)["--port"]), *range(control, control + 16)]
    assert len(set(ports)) == len(ports) == 6 * 17


def test_engines_have_the_clusters_key_and_one_api_key_that_no_command_line_shows(install, monkeypatch):
    monkeypatch.setenv("KVFERRY_CLUSTER_KEY_FILE", "/another/key")
    cluster = prepared(install())
    key = cluster._config.security.cluster_key
    specs = [cluster._spec(name) for worker in ENGINES for name in (worker, f"{worker}-vllm")]
    (api_key,) = {spec.environment["VLLM_API_KEY"] for spec in specs}
    assert len(api_key) > 30
    for spec in specs[1::2]:
        assert read_keys(read_settings({}), os.environ | spec.environment) == read_keys(
            read_settings({}), {"KVFERRY_CLUSTER_KEY": key}
        )
    words = [word for spec in specs for word in spec.command]
    words += [word for worker in ENGINES for word in program_of(cluster, worker).command]
    assert not [word for word in words if key in word or api_key in word]


def test_aggregated_engines_need_no_plug_in(install):
    cluster = prepared(install(kvferry_vllm="", vllm="0.33.1"), "local.aggregated=true")
    assert list(cluster._roles) == ["aggregated-0"]
    assert "--kv-transfer-config" not in options_of(cluster, "aggregated-0")


def test_a_hugging_face_id_is_passed_on_with_its_revision(install):
    cluster = prepared(install(), "model.name=owner/name@v2")
    assert program_of(cluster, "decode-0").command[1:5] == ("serve", "owner/name", "--revision", "v2")


def test_weights_in_a_folder_are_for_vllm_to_choose(install, tmp_path, monkeypatch):
    command = install()
    monkeypatch.setattr(vllm_preflight, "resolve_model", resolve_model)
    for name in ("config.json", "tokenizer.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    cluster = prepared(command, f"model.name={tmp_path}")
    assert program_of(cluster, "decode-0").command[1:3] == ("serve", str(tmp_path))


def test_the_gpus_are_shared_out_evenly():
    roles = {"prefill-0": "prefill", "decode-0": "decode"}
    plans = plan_servers(roles, {"CUDA_VISIBLE_DEVICES": "4,5,6,7,8"}).values()
    assert [plan.gpus for plan in plans] == [("4", "5"), ("6", "7")]
    assert [plan.gpus for plan in plan_servers(roles, {"CUDA_VISIBLE_DEVICES": "4"}).values()] == [(), ()]


def test_gpus_are_those_of_the_variable_or_all_devices(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}, tmp_path) == ["GPU-a", "3"]


def test_servers_see_their_own_gpus_only(install, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cluster = prepared(install())
    assert [cluster._spec(f"{worker}-vllm").environment["CUDA_VISIBLE_DEVICES"] for worker in ENGINES] == ["0", "1"]


def test_servers_of_the_cpu_build_bind_no_cores(install):
    variables = prepared(install(vllm="0.32.0+cpu"))._spec("decode-0-vllm").environment
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in prepared(install())._spec("decode-0-vllm").environment


def test_variables_of_the_options_come_before_those_of_the_cluster(install):
    cluster = prepared(install(vllm="0.32.0+cpu"), environment={"VLLM_CPU_KVCACHE_SPACE": "7"})
    assert cluster._spec("decode-0-vllm").environment["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert cluster._spec("router").environment == {"VLLM_CPU_KVCACHE_SPACE": "7"}


def test_a_server_that_does_not_start_shows_enough_of_its_log_for_the_cause(tmp_path):
    config = load_config(assignments=["local.engine=vllm"])
    cluster = LocalCluster(config, log_dir=tmp_path)
    for name in ("prefill-0-vllm", "prefill-0"):
        (tmp_path / f"{name}.log").write_text("\n".join(["the cause", *["a line of a traceback"] * 60]))
    assert "the cause" in cluster._failed("prefill-0-vllm", "did not start").message
    assert "the cause" not in cluster._failed("prefill-0", "did not start").message


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["/nowhere/vllm", "no-such-command-of-vllm", "''"])
def test_a_command_that_is_not_there_is_refused(command):
    refused = refusal(command)
    assert refused.param == "local.vllm_command"
    assert "no such command" in refused.message


def test_a_version_that_the_plug_in_does_not_support_is_named(install):
    message = refusal(install(vllm="0.31.2")).message
    assert "it is vLLM 0.31.2, and the plug-in supports 0.32" in message


def test_a_missing_plug_in_is_refused_with_the_way_to_install_it(install, tmp_path):
    message = refusal(install(kvferry_vllm="")).message
    assert f"make wheel-vllm` and `{tmp_path}/python3 -m pip install dist/kvferry_vllm-*.whl`, or use --aggregated" in message


def test_an_environment_without_vllm_is_refused(install):
    assert "vllm is not installed" in refusal(install(vllm="")).message


def test_plug_ins_that_leave_ours_out_are_refused(install, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "add kvferry to it" in refusal(install()).message
    monkeypatch.setenv("VLLM_PLUGINS", "other, kvferry")
    prepared(install())


def test_the_interpreter_of_a_path_that_is_too_long_for_a_first_line_is_found(install):
    long_form = "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    assert "it is vLLM 0.31.2" in refusal(install(long_form, vllm="0.31.2")).message


def test_a_command_that_names_no_environment_is_started_as_it_is(install):
    command = install("#!/bin/sh\nexec docker run vllm\n", vllm="")
    assert program_of(prepared(f"{command} --flag"), "decode-0").command[:3] == (command, "--flag", "serve")


def test_a_python_as_the_command_is_asked_itself():
    found = vllm_preflight.find_command(f"{sys.executable} -m some.module", os.environ)
    with pytest.raises(ConfigError, match="vllm is not installed"):
        vllm_preflight.check_versions(found, os.environ, needs_plugin=True)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("local.vllm_arguments=--port 8000", "--port: a local cluster chooses it"),
        ("local.vllm_arguments=--kv_transfer_config={}", "--kv-transfer-config: a local cluster chooses it"),
        ("local.vllm_arguments='unbalanced", "No closing quotation"),
        ("local.num_encode=1", "encode workers are for kvferry's own engine"),
        ("model.quantization=int8", "for kvferry's own engine; leave it out"),
        ("local.kvstore=true", "the store is for kvferry's own engine"),
        ("connector.name=shared", "vLLM engines hand off by p2p"),
        ("connector.transports=shm", "connector.transports: vLLM engines need tcp or nixl, as they have no pool in shared"),
        ("connector.transports=[]", "connector.transports: vLLM engines need tcp or nixl"),
    ],
)
def test_settings_that_vllm_engines_do_not_have_are_refused(install, assignment, words):
    refused = refusal(install(), assignment)
    assert refused.param == assignment.partition("=")[0]
    assert words in refused.message


@pytest.mark.parametrize("assignment", ["agent.engine=http://127.0.0.1:9", "agent.api_key_file=/key"])
def test_settings_of_agents_that_the_cluster_chooses_are_refused(assignment):
    with pytest.raises(ConfigError, match="a local cluster chooses it") as refused:
        cluster_of("vllm", assignment)
    assert refused.value.param == assignment.partition("=")[0]


@pytest.mark.parametrize("key", [os.fsdecode(b"a\xff"), "aä"])
def test_an_api_key_that_no_header_can_hold_is_refused_before_engines_start(monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ConfigError, match=r"^\$VLLM_API_KEY: character 2 of the key "):
        cluster_of("vllm")


def test_the_supported_versions_are_those_of_the_plug_in():
    assert set(vllm_preflight.SUPPORTED_MINORS) == set(SUPPORTED_MINORS)
