"""One cluster of real processes for all clients, and how a client's script runs against it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from core.config_types import default_cache_dir
from core.model.hub import resolve_model
from kvferry.local import LocalCluster
from tests.support.vllm_engine import vllm_python

MODEL = "smollm2-135m"
API_KEY = "a-key-of-the-clients-suite"
TIMEOUT_S = 540.0  # less than a test has; a busy machine needs minutes
# Clients ask hubs, price lists and telemetry for news; here they get none.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_API_KEY": API_KEY,
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def clients_folder() -> Path:
    """Return the environment that ``make install-clients`` makes."""
    return Path(default_cache_dir()) / "clients"


@pytest.fixture(scope="session", autouse=True)
def _clients_are_installed() -> None:
    for python, target in ((clients_folder() / "bin/python", "install-clients"), (vllm_python(), "install-vllm")):
        if not python.is_file():
            pytest.skip(f"no {python}: run `make {target}`")


@pytest.fixture(scope="module")
def cluster(cluster_config, tmp_path_factory) -> Iterator[LocalCluster]:
    """One prefill and one decode worker with the small instruct model, behind a key."""
    settings = ("connector.transports=[shm]", "router.tools_in_prompt=hermes", f"router.api_key={API_KEY}")
    with LocalCluster(cluster_config(*settings), log_dir=tmp_path_factory.mktemp("clients")) as found:
        yield found


@pytest.fixture(scope="module")
def model_folder() -> Path:
    """The model's files, for clients that count tokens themselves."""
    return resolve_model(MODEL, Path(default_cache_dir())).path


@pytest.fixture
def run(tmp_path) -> Callable[..., str]:
    """Run a command to its end in an empty folder; return what it wrote, and fail if it failed."""

    def call(*command: str | Path, environment: Mapping[str, str] | None = None) -> str:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(part) for part in command],
            cwd=tmp_path,
            env=inherited | ENVIRONMENT | {"HOME": str(tmp_path)} | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
        return done.stdout

    return call
