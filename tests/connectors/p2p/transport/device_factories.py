"""Makes transports for workers whose pool is on a device; beside ``transport_factories``, which does without torch."""

import dataclasses
from functools import partial

import torch

from connectors.p2p.transport.tcp import TcpTransport
from core.ids import RandomIds
from core.testing.delayed_device import DelayedDevice
from core.transport import RowRegion

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
