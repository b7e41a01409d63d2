"""The resources of this machine: memory, GPUs, addresses and folders, checked without the libraries that use them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CUDA_DRIVER = "libcuda.so.1"
_WILDCARDS = {"", "0.0.0.0", "::"}  # stand for all addresses of this machine


def memory_limit_bytes(limit_files: Sequence[str] = CGROUP_LIMITS) -> int:
    """Return the memory of this container, or of the machine where it has no limit of its own."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limit_files:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(machine, int(text))
    return machine


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit, such as ``1 GiB`` or ``1.5 MiB``."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB" if num_bytes < 1024 else f"{num_bytes / 1024:.4g} TiB"


def why_no_cuda() -> str | None:
    """Return why torch would find no CUDA device here, or None if it would find one. Does not load torch."""
    with contextlib.suppress(PackageNotFoundError):
        if version("torch").endswith("+cpu"):
            return f"torch {version('torch')} is built for the CPU only"
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return f"there is no NVIDIA driver ({_CUDA_DRIVER})"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "the NVIDIA driver shows no device"
    return None


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> list[str]:
    """Return NVIDIA's GPUs as ``$CUDA_VISIBLE_DEVICES`` names them: those that it lists, else all of this machine."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    found = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")]
    return [str(number) for number in range(len(found))]


def share_an_address(first: str, second: str) -> bool:
    """Return True if two hosts to listen on have an address of this machine in common. Asks the resolver for names.

    ``::`` counts as every address, as ZeroMQ takes it; an HTTP server at it would leave the addresses of IPv4 to others.
    """
    ours, theirs = _addresses_of(first), _addresses_of(second)
    return bool(ours & theirs) or bool((ours | theirs) & _WILDCARDS)


def _addresses_of(host: str) -> set[str]:
    """Return the addresses that a host stands for; the host as it is if it is an interface, or nobody knows it."""
    name = _name_of(host)
    if not name or _is_interface(name):
        return {name}
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    except (OSError, ValueError):  # the second: no possible name, such as one with an empty label
        return {name}


def _name_of(host: str) -> str:
    """Return a host as sockets take it; "" means all addresses."""
    return "" if host == "*" else host.strip("[]")


def _is_interface(name: str) -> bool:
    return name in {interface for _, interface in socket.if_nameindex()}


def why_not_writable(folder: Path) -> str | None:
    """Try to make a folder and a file in it; return why that fails. The folder stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def why_not_creatable(folder: Path) -> str | None:
    """Return why ``why_not_writable`` would fail, as far as the folders that exist already tell. Leaves nothing behind."""
    try:
        return why_not_writable(next(path for path in (folder, *folder.parents) if path.exists()))
    except OSError as error:  # one of the parents cannot be searched
        return error.strerror or str(error)
