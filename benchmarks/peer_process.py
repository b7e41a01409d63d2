"""A program in vLLM's environment (``make install-vllm``), asked by lines of JSON: for comparisons in turns with ours.

Owns the process and its pipes. The program reads a line from standard input and answers by one line; its log goes to standard
error, which is kept for an error's message.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from core.config_types import default_cache_dir

VERSION = "0.32.0"
STOP_TIMEOUT_S = 20.0
_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "1",
}


class PeerFailed(Exception):
    """The program has ended without an answer, or its environment is not installed."""


class PeerProcess:
    """A script of this folder under vLLM's interpreter; a context manager."""

    def __init__(self, script: str, *arguments: str, num_threads: int = 1) -> None:
        python = Path(default_cache_dir()) / f"vllm-{VERSION}" / "bin" / "python"
        if not python.exists():
            raise PeerFailed(f"{python} does not exist: make install-vllm")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | _ENVIRONMENT | {"OMP_NUM_THREADS": str(num_threads)},
        )

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, question: object) -> Any:  # noqa: ANN401
        """Send a question and return the answer.

        Raises:
            PeerFailed: the program has ended; the message has the end of its log.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise PeerFailed(f"vLLM's side has ended: {self._log.read()[-2000:]}")
        return json.loads(answer)
