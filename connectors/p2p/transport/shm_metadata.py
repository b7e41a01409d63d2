"""What a producer tells its consumers about its memory, so that they can map it.

The pool is a memory file or memory on a device; everything else is a memory file. Producers of pools in host memory send what
they always have.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from connectors.p2p.transport.base import RowShape, SystemNumber
from core.struct_types import prepared

TOKEN_BYTES = 32
HANDLE_BYTES = 64  # of CUDA IPC


class MemoryFileRef(msgspec.Struct, frozen=True, kw_only=True):
    """One region of the producer: its descriptor number in the producer's process, and the proof that it is that file."""

    fd: SystemNumber
    inode: int
    shape: RowShape


class DeviceMemoryRef(msgspec.Struct, frozen=True, kw_only=True):
    """A pool on a device: the CUDA IPC handle of its allocation, and where in that it begins.

    ``address`` is where it begins in the producer's process, for consumers in the same process: CUDA opens no handle there.
    """

    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**48)]
    address: Annotated[int, msgspec.Meta(ge=0, lt=2**56)]
    shape: RowShape


@prepared
class ShmMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a producer tells its consumers. ``device`` is its pool, if that is on one; ``files`` are all other regions."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    token_fd: SystemNumber
    token: bytes
    files: tuple[MemoryFileRef, ...]
    device: DeviceMemoryRef | None = None

    @property
    def shapes(self) -> list[RowShape]:
        """Shapes of all regions, in order."""
        pool = [] if self.device is None else [self.device.shape]
        return [*pool, *(file.shape for file in self.files)]
