"""Seals the size of a memory file, and tells whether it is sealed.

Shrinking a file kills every process that has mapped it, by SIGBUS at its next access; so readers map only files whose size is
sealed. Source: fcntl(2).
"""

from __future__ import annotations

import fcntl


def seal_size(fd: int) -> None:
    """Seal the size of a memory file that was made with ``MFD_ALLOW_SEALING``. Raises: OSError."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def cannot_shrink(fd: int) -> bool:
    """Return True if the file behind ``fd``, of any process, is a memory file that cannot be shrunk."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False  # no memory file
