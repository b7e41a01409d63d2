"""The files of a folder in the Hugging Face layout: which of several count, as transformers chooses them.

Owns the choice of weight files, chat templates and special tokens. Torch-free. Knows nothing of the origin of a folder
(``core.model.hub``) or of the content of weight files (``core.model.checkpoint``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError

TEXT_PATTERNS = ("*.json", "*.jinja")
_CONFIG = "config.json"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ANY = "*.safetensors"
_ADAPTER = "adapter_config.json"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the one file of whole weights, else the shards of the index, else every safetensors file.

    Raises:
        ConfigError: files are missing, or the folder holds an adapter of another model.
    """
    if (folder / _ADAPTER).is_file():
        raise ConfigError(
            f"{folder} holds {_ADAPTER}: adapters are not applied; merge it into its model, and remove that file",
            param="model.name",
        )
    if (folder / _WHOLE).is_file():
        return (folder / _WHOLE,)
    files = tuple(folder / name for name in _shards(folder)) or tuple(sorted(folder.glob(_ANY)))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ConfigError(f"{folder} lacks safetensors weights: {', '.join(missing) or 'none found'}", param="model.name")
    return files


def fetch_weights(folder: Path, fetch: Callable[[Sequence[str]], object]) -> None:
    """Let ``fetch`` put what ``weight_files`` would return into a folder that has all its text files, and no other weights.

    ``fetch`` takes names or patterns of files, of which the origin may have none.
    """
    if not (folder / _WHOLE).is_file():
        fetch([_WHOLE, _CONFIG])  # which is there already: huggingface-hub warns of patterns that match nothing
    if (folder / _WHOLE).is_file():
        return
    shards = _shards(folder)
    if not shards or not all((folder / name).is_file() for name in shards):
        fetch(shards or [_ANY])


def _shards(folder: Path) -> list[str]:
    """Return the names of the files in the index; none without one."""
    index = read_json(folder / _INDEX)
    return [] if index is None else sorted(set(index["weight_map"].values()))


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return ``tokenizer_config.json``; in old folders, ``special_tokens_map.json`` names the special tokens.

    Old are those whose config says nothing of added tokens, as for transformers.
    """
    config = read_json(folder / "tokenizer_config.json") or {}
    if "added_tokens_decoder" in config:
        return config
    return {**config, **(read_json(folder / "special_tokens_map.json") or {})}


def chat_templates(folder: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the chat templates by name; a single one is ``default``, and one for requests with tools is ``tool_use``.

    They are those of separate files, else of ``settings``, the tokenizer's. Older models with image input have
    ``chat_template.json``.
    """
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    single = folder / "chat_template.jinja"
    if single.is_file():
        files["default"] = single
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    found = (read_json(folder / "chat_template.json") or settings).get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, dict):
        return found
    return {"default": found} if found else {}


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if the file does not exist.

    Raises:
        ConfigError: it is not valid JSON, or no object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param="model.name") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object", param="model.name")
    return value
