"""The doctor looks at a model's files as a worker that starts does."""

from __future__ import annotations

import json
import struct

import pytest

from kvferry import doctor_checks
from tests.kvferry.findings import OF_ANY_PROCESS, verdicts


def test_model_that_is_not_fetched_comes_with_the_command_to_fetch_it(tmp_path):
    found = verdicts(doctor_checks.check_model, f"model.cache_dir={tmp_path}")["model"]
    assert (found.verdict, found.fix) == ("warning", "kvferry models smollm2-135m")


TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    (folder / "tokenizer.json").touch()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


def test_model_in_a_folder_is_found(model_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(model_folder.parent))
    names = [f"model.name={model_folder}", "model.name=~/m"]
    assert [verdicts(doctor_checks.check_model, name)["model"].verdict for name in names] == ["ok", "ok"]
    (model_folder / "config.json").unlink()
    found = [verdicts(doctor_checks.check_model, name)["model"] for name in names]
    assert [one.verdict for one in found] == ["failure"] * 2
    assert [one.text for one in found] == [f"model.name = {name} holds no config.json" for name in (model_folder, "~/m")]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", b"{}", "model_type"),
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("model.safetensors", None, "lacks safetensors weights"),
        ("model.safetensors", b"cut", "cannot be read as a safetensors file"),
    ],
)
def test_model_that_a_worker_would_refuse_is_a_failure_except_for_other_processes(name, content, text, model_folder):
    (model_folder / name).unlink() if content is None else (model_folder / name).write_bytes(content)
    found = verdicts(doctor_checks.check_model, f"model.name={model_folder}")["model"]
    assert (found.verdict, text in found.text) == ("failure", True)
    assert verdicts(doctor_checks.check_model, f"model.name={model_folder}", OF_ANY_PROCESS)["model"].verdict == "warning"


def test_settings_that_do_not_fit_the_model_are_a_failure(model_folder):
    found = verdicts(doctor_checks.check_model, f"model.name={model_folder}", "model.max_model_len=65")["model"]
    assert (found.verdict, "model.max_model_len = 65" in found.text) == ("failure", True)


def test_encode_workers_of_a_model_that_reads_text_only_are_refused_as_serve_does(model_folder):
    settings = [f"model.name={model_folder}", "local.num_encode=1"]
    found = verdicts(doctor_checks.check_model, *settings)["model"]
    assert (found.verdict, "reads text only; leave encode workers out" in found.text) == ("failure", True)
    assert verdicts(doctor_checks.check_model, *settings, OF_ANY_PROCESS)["model"].verdict == "ok", "serve starts them"


def test_model_of_vllm_is_not_compared_with_what_our_engine_computes(model_folder):
    (model_folder / "config.json").write_text('{"model_type": "other"}')
    settings = [f"model.name={model_folder}", "local.engine=vllm"]
    assert verdicts(doctor_checks.check_model, *settings)["model"].verdict == "ok"
    (model_folder / "model.safetensors").unlink()
    (model_folder / "pytorch_model.bin").touch()
    (model_folder / "adapter_config.json").write_text("{}")
    assert verdicts(doctor_checks.check_model, *settings)["model"].verdict == "ok"


def test_model_of_no_kind_is_refused_as_serve_refuses_it():
    found = verdicts(doctor_checks.check_model, "model.name=llama")["model"]
    assert (found.verdict, "is no alias" in found.text) == ("failure", True)


@pytest.mark.parametrize("name", ["acme/tiny", "acme/tiny@main", "acme/tiny@v1"])
def test_model_of_the_hub_is_found_where_it_is_stored(name, tmp_path):
    names = [f"model.cache_dir={tmp_path}", f"model.name={name}"]
    snapshot = hub_snapshot(tmp_path, name.partition("@")[2] or "main")
    assert verdicts(doctor_checks.check_model, *names)["model"].verdict == "warning", "it has no weights yet"
    (snapshot / "model.safetensors").touch()
    assert verdicts(doctor_checks.check_model, *names)["model"].verdict == "ok"
    assert verdicts(doctor_checks.check_model, *names, "model.name=acme/tiny@v2")["model"].verdict == "warning"


def hub_snapshot(cache, revision):
    """Make a folder of the hub's library for one revision of a model, as it is without weights."""
    folder, commit = cache / "huggingface" / "models--acme--tiny", "0123456789abcdef0123456789abcdef01234567"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(commit)
    return snapshot
