"""Whether shared memory works between two workers.

The handshake compares the ids of both workers as opaque strings.
"""

from __future__ import annotations

import os
from pathlib import Path


def host_id() -> str:
    """Return a string that is equal on two workers that can open each other's ``/proc/<pid>/fd``.

    That takes the same kernel (boot id), the same numbering of processes (pid namespace) and the same user. Where one of them
    cannot be read, the id is unique to this process, so that shared memory is not chosen.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = os.readlink("/proc/self/ns/pid")
        user_namespace = os.readlink("/proc/self/ns/user")
    except OSError:
        return f"unknown:{os.uname().nodename}:{os.getpid()}"
    return f"{boot}/{pid_namespace}/{user_namespace}/{os.getuid()}"
