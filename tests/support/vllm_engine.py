"""A real vLLM engine on CPU as a child process, for the tests of the plug-in: start, ask, freeze, kill.

It runs from an environment of its own (``make install-vllm``), in which our packages come by PYTHONPATH. The engine's program
is ``tests/vllm/engine_process.py``.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from core.config_types import default_cache_dir

VERSION = "0.32.0"
STOP_TIMEOUT_S = 10.0
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

CPU_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two engines bind the same cores, and spin
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
}

_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = CPU_ENVIRONMENT | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of the engine's program, to be called on its ranks
}


def temporary_files(folder: str) -> dict[str, str]:
    """Return the variables by which vLLM puts into ``folder`` the sockets and files that it leaves when it is killed.

    What it compiles stays where it is found again.
    """
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return {"VLLM_RPC_BASE_PATH": folder, "TMPDIR": folder, "TORCHINDUCTOR_CACHE_DIR": compiled}


def vllm_python() -> Path:
    """Return the interpreter of the environment that ``make install-vllm`` makes."""
    return Path(default_cache_dir()) / f"vllm-{VERSION}" / "bin" / "python"


class EngineFailed(Exception):
    """An engine has died, or a request did not end as it should."""


class VllmEngine:
    """An engine with the connector of kvferry, or another one. A context manager: what starts it ends it.

    ``extra`` is ``kv_connector_extra_config``; ``with_layout`` lets the CPU backend use BLHNC. ``arguments`` are those of
    ``LLM``. ``log_path`` gets what the engine writes.
    """

    def __init__(
        self,
        log_path: Path,
        model: Path,
        *,
        extra: dict[str, Any] | None = None,
        connector: str = "KvferryConnector",
        policy: str = "recompute",
        num_blocks: int = 40,
        with_layout: bool = True,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.log_path = log_path
        transfer: dict[str, Any] = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra or {},
        }
        if connector == "KvferryConnector":
            transfer["kv_connector_module_path"] = "connectors.vllm.connector"
        self._arguments = {
            "model": str(model),
            "dtype": "float32",
            "block_size": 32,
            "num_gpu_blocks_override": num_blocks,
            "max_model_len": 1024,
            "kv_transfer_config": transfer,
        } | arguments
        path = [str(_ROOT), *([str(_ROOT / "tests/vllm/cpu_layout")] if with_layout else [])]
        self._environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)} | (environment or {})
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> VllmEngine:
        """Start the process; ``wait`` returns when the engine is ready, so that several can start together."""
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                [str(vllm_python()), str(_ROOT / "tests/vllm/engine_process.py"), json.dumps(self._arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment | temporary_files(self._folder.name),
            )
        return self

    def wait(self) -> VllmEngine:
        """Return once the engine answers."""
        if self._receive() != "ready":
            raise EngineFailed("it does not say that it is ready")
        return self

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._running.pid

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "it has been started"
        return self._process

    def ask(self, operation: str, **arguments: Any) -> Any:
        """Have the engine carry out a command of ``EngineProcess``, and return its answer."""
        assert self._running.stdin is not None
        self._running.stdin.write(json.dumps({"op": operation, **arguments}) + "\n")
        self._running.stdin.flush()
        return self._receive()

    def generate(self, name: str, prompt: list[int], max_tokens: int = 16, **options: Any) -> dict[str, Any]:
        """Return the result of one request: its tokens, finish reason and ``kv_transfer_params``."""
        self.ask("add", name=name, prompt=prompt, max_tokens=max_tokens, **options)
        found: dict[str, Any] = self.ask("result", name=name)
        return found

    def freeze(self) -> None:
        """Stop the process where it is."""
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        process, self._process = self._process, None
        if process is not None and self._folder is not None:
            process.kill()
            process.communicate()
            self._folder.cleanup()

    def _receive(self) -> Any:
        assert self._running.stdout is not None
        line = self._running.stdout.readline()
        if not line:
            self._running.wait(STOP_TIMEOUT_S)
            raise EngineFailed(f"the engine has died:\n{self.log_path.read_text()[-4000:]}")
        return json.loads(line)

    def __enter__(self) -> VllmEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
