"""Downloads one wheel from a package index: by pip, which knows the machine's index and proxy, or without pip.

Owns the download only; the caller verifies the checksum. The container images have no pip, so there the index's JSON (PEP 691)
is read directly; proxies are those of the environment.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import httpx

from core.config_types import default_package_index
from core.errors import ConfigError

DOWNLOAD_TIMEOUT_S = 1800.0
_READ_TIMEOUT_S = 60.0  # between two pieces


def download_wheel(requirement: str, folder: Path) -> Path:
    """Fetch the wheel of ``name==version``, without its dependencies, into ``folder``.

    Raises:
        ConfigError: it could not be fetched.
    """
    if importlib.util.find_spec("pip") is not None:
        return _download_by_pip(requirement, folder)
    return download_from_index(requirement, folder, default_package_index())


def download_from_index(requirement: str, folder: Path, index_url: str) -> Path:
    """Fetch the wheel of ``name==version`` from an index with a JSON interface.

    Raises:
        ConfigError: the index cannot be reached, or has no such wheel.
    """
    try:
        with httpx.Client(timeout=_READ_TIMEOUT_S, follow_redirects=True) as client:
            file_name, url = _find_wheel(client, requirement, index_url)
            return _download(client, url, folder / file_name)
    except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{requirement} could not be fetched from {index_url}: {error!r}", param="model.name") from error


def _find_wheel(client: httpx.Client, requirement: str, index_url: str) -> tuple[str, str]:
    """Return the file name and address of the wheel of ``name==version``."""
    name, _, version = requirement.partition("==")
    page = f"{index_url.rstrip('/')}/{name}/"
    listed = client.get(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"}).raise_for_status().json()["files"]
    prefix = f"{re.sub(r'[-_.]+', '_', name)}-{version}-".lower()
    for file in listed:
        if file["filename"].lower().startswith(prefix) and file["filename"].endswith(".whl"):
            return Path(file["filename"]).name, str(httpx.URL(page).join(file["url"]))
    raise ConfigError(f"{page} has no wheel of {requirement}", param="model.name")


def _download(client: httpx.Client, url: str, target: Path) -> Path:
    with client.stream("GET", url) as answer, target.open("wb") as file:
        for piece in answer.raise_for_status().iter_bytes():
            file.write(piece)
    return target


def _download_by_pip(requirement: str, folder: Path) -> Path:
    command = ["env", f"TMPDIR={folder}", sys.executable, "-m", "pip", "download"]  # in this folder its progress is visible
    command += ["--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        subprocess.run(
            [*command, "--dest", str(folder), requirement],
            check=True,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ConfigError(f"pip could not download {requirement}: {reason}", param="model.name") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip took over {DOWNLOAD_TIMEOUT_S:.0f} s to download {requirement}", param="model.name") from error
    return next(folder.glob("*.whl"))
