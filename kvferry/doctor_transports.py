"""What the doctor says of the transports in use: kernel features, libraries and limits.

A transport that does not work is skipped by a worker, so it is a failure only where no other one is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from connectors.p2p.transport.nixl import INSTALL_HINT, installed_module
from connectors.p2p.transport.shm import ShmTransport
from core.config import KVFerryConfig
from core.ids import RandomIds
from kvferry.cluster_plan import is_for_serve, workers_here
from kvferry.connector_preflight import used_transports, why_no_nixl
from kvferry.finding import Finding


def check_transports(config: KVFerryConfig) -> Iterator[Finding]:
    """Check the requirements of each transport that a worker here, or a vLLM engine, has."""
    workers = workers_here(config) or {"engine": ("prefill", config)}
    are_all = is_for_serve(config) and config.local.engine != "vllm"
    wanted = list(used_transports(workers, are_all=are_all).values())
    found = {name: list(_check_transport(name)) for name in dict.fromkeys(name for names in wanted for name in names)}
    broken = {name for name, findings in found.items() if any(finding.verdict == "failure" for finding in findings)}
    needed = {name for names in wanted if broken.issuperset(names) for name in names}
    for name, findings in found.items():
        for finding in findings:
            is_skipped = finding.verdict == "failure" and name not in needed
            yield (
                replace(finding, verdict="warning", fix=f"{finding.fix}; until then others are used") if is_skipped else finding
            )


def _check_transport(name: str) -> Iterator[Finding]:
    if name == "shm":
        yield from _check_shm()
    elif name == "nixl":
        yield from _check_nixl()
    else:
        yield Finding(f"transport {name}", "ok", "needs nothing but the network")


def _check_shm() -> Iterator[Finding]:
    reason = ShmTransport(RandomIds()).unavailable_reason()
    text = reason or "works between processes of this host and user (in Kubernetes: of one pod); KV pools on a GPU: of one GPU"
    yield Finding("transport shm", "failure" if reason else "ok", text, "use nixl or tcp")
    if "expandable_segments:true" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
        text = "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True: a KV pool on a GPU is in memory that cannot be shared"
        yield Finding("transport shm", "warning", text, "leave that out, or use tcp")


def _check_nixl() -> Iterator[Finding]:
    if installed_module() is None:
        yield Finding("transport nixl", "failure", "the library is not installed", "pip install 'kvferry[nixl]'")
        return
    failure = why_no_nixl()
    yield Finding("transport nixl", "failure" if failure else "ok", failure or "the library can be loaded", INSTALL_HINT)
    if failure:
        return
    reason = why_memory_of_others_cannot_be_read()
    fix = "allow ptrace between processes of one user (kernel.yama.ptrace_scope=0), or UCX goes by a slower way on one host"
    yield Finding("transport nixl", "warning" if reason else "ok", reason or "cross-memory attach is permitted", fix)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = soft != resource.RLIM_INFINITY
    text = f"at most {soft >> 10} KiB may be locked" if is_limited else "memory may be locked without limit"
    fix = "RDMA locks the KV pool: raise memlock of the container runtime; IPC_LOCK does nothing for a process that is not root"
    has_nic = Path("/sys/class/infiniband").is_dir()
    yield Finding("transport nixl", "failure" if is_limited and has_nic else "ok", text, fix)


def why_memory_of_others_cannot_be_read() -> str | None:
    """Try to read memory of a process that is not our child, as UCX's cross-memory attach does; None if it works."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return "this C library has no process_vm_readv"
    word = ctypes.create_string_buffer(b"kvferry!", 8)
    pid = os.fork()
    if pid == 0:  # the child reads its parent, which is not its descendant
        copy = ctypes.create_string_buffer(8)
        local = (ctypes.c_void_p * 2)(ctypes.addressof(copy), 8)
        remote = (ctypes.c_void_p * 2)(ctypes.addressof(word), 8)
        num_bytes = libc.process_vm_readv(os.getppid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        os._exit(0 if num_bytes == 8 and copy.raw == word.raw else ctypes.get_errno() or errno.EIO)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return None if status == 0 else f"memory of other processes cannot be read: {os.strerror(status)}"
