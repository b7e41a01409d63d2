"""Makes transports for workers whose pool is on a device; ``transport_factories`` does the same without torch."""

import dataclasses
from functools import partial

import torch

from connectors.p2p.transport.interface import RowRegion
from connectors.p2p.transport.nixl import NixlTransport
from connectors.p2p.transport.shm import ShmTransport
from connectors.p2p.transport.tcp_client import TcpTransport
from connectors.testing.delayed_device import DelayedDevice
from core.block_copier import cuda_block_copier
from core.ids import RandomIds
from core.peer_memory import CudaPeerMemory
from tests.support.shared_device import on_shared_device

NUM_SLOTS = 3


class TcpBesideDevice(TcpTransport):
    """The transport in a worker whose pool, region 0, is on a device, which does copies when it likes to."""

    def register(self, regions, staging=None):
        pool, *others = regions
        super().register([on_device(pool), *others], staging)


def on_device(region: RowRegion) -> RowRegion:
    rows = torch.frombuffer(region.buffer, dtype=torch.uint8).view(region.num_rows, region.row_bytes)
    copier = partial(DelayedDevice(seed=1).new_copier, rows, NUM_SLOTS)
    return dataclasses.replace(region, buffer=None, memory_fd=None, device="cuda:0", new_copier=copier)


def make_tcp_beside_device() -> TcpBesideDevice:
    return TcpBesideDevice(RandomIds(), "tcp://127.0.0.1:0")


class ShmBesideDevice(ShmTransport):
    """The transport in a worker whose pool, region 0, is on a device that copies when it likes to."""

    def register(self, regions, staging=None):
        pool, *others = regions
        super().register([on_shared_device(pool), *others], staging)


def make_shm_beside_device() -> ShmBesideDevice:
    return ShmBesideDevice(RandomIds())


class OnGpu:
    """A transport in a worker whose pool is in video memory; the host memory that the suite looks at shows what is there.

    Rows that the suite has written on the host go to video memory first, with the next call.
    """

    def register(self, regions, staging=None):
        pool, *others = regions
        self.host = torch.frombuffer(pool.buffer, dtype=torch.uint8).view(pool.num_rows, pool.row_bytes)
        self.shown = self.host.clone()
        self.video = self.host.cuda()
        on_gpu = dataclasses.replace(
            pool,
            base_address=self.video.data_ptr(),
            buffer=None,
            memory_fd=None,
            device=str(self.video.device),
            new_copier=partial(cuda_block_copier, self.video),
            synchronize=torch.cuda.synchronize,
            new_peer_memory=partial(CudaPeerMemory, self.video),
        )
        super().register([on_gpu, *others], staging)

    def post_read(self, *read):
        """A read may begin at once."""
        self._take_what_was_written()
        return super().post_read(*read)

    def poll(self):
        self._take_what_was_written()
        results = super().poll()
        self._show()
        return results

    def remove_peer(self, peer):
        """The suite looks at the memory before and after: at what is there when this returns, and not at the last poll."""
        self._take_what_was_written()
        super().remove_peer(peer)
        self._show()

    def _take_what_was_written(self):
        for row in (self.host != self.shown).any(1).nonzero().flatten().tolist():
            self.video[row].copy_(self.host[row])
            self.shown[row].copy_(self.host[row])

    def _show(self):
        self.host.copy_(self.video)
        self.shown.copy_(self.host)


class TcpOnGpu(OnGpu, TcpTransport):
    pass


class NixlOnGpu(OnGpu, NixlTransport):
    pass


class ShmOnGpu(OnGpu, ShmTransport):
    pass


def make_tcp_on_gpu() -> TcpOnGpu:
    return TcpOnGpu(RandomIds(), "tcp://127.0.0.1:0")


def make_nixl_on_gpu() -> NixlOnGpu:
    return NixlOnGpu(RandomIds(), "test")


def make_shm_on_gpu() -> ShmOnGpu:
    return ShmOnGpu(RandomIds())
