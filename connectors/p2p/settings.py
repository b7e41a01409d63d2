"""The settings of an agent and its driver: how it reads, and how long it keeps blocks for consumers.

Values without behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from connectors.p2p.consumer.transport_health import BreakerTerms
from connectors.p2p.producer.leases import LeaseTerms
from core.clock import Clock
from core.ids import IdSource
from core.wire.curve import ClusterKeys
from core.wire.kv import KVVerify

RENEWAL_S = 20.0  # what a renewal adds, at most
LEASE_MARGIN_S = 1.0  # what must be left of a lease for a read of some MiB to be started, at most
READ_BYTES = 16 << 20  # a read by CMA is a copy that cannot be interrupted; four converted ones fit the staging area
HOST_READ_BYTES = {"shm": 32 << 20}  # it cuts its copies itself; each read costs two changes of threads
# Copies to device memory are fast: in smaller reads the requests would dominate.
DEVICE_READ_BYTES = dict.fromkeys(("shm", "nixl"), 128 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """What an operator sets about transfers, by the names of the section ``connector``. Durations are in seconds."""

    transports: Sequence[str]
    kv_verify: KVVerify
    transfer_deadline_s: float
    transfer_stall_s: float
    transport_retry_s: float
    transport_retry_max_s: float
    handshake_timeout_s: float
    max_quarantined_blocks: int  # 0 = a quarter of the pool
    lease_s: float
    lease_renew_interval_s: float
    lease_max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """The settings of a driver, with its clock and randomness.

    ``control_address`` is where a producer binds its control socket, ``data_port`` the port of its data socket (0 = any).
    ``keys`` encrypt both; None = they are open. ``unsealed_patience_s`` is how long blocks without a seal are read again: more
    than 0 where producers grant leases before they seal.
    """

    transfer: TransferSettings
    control_address: str
    data_port: int = 0
    advertise_host: str
    keys: ClusterKeys | None = None
    unsealed_patience_s: float = 0.0
    clock: Clock
    ids: IdSource


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Durations and bounds. A read is one handle of a transport; a load is cut into reads of at most ``max_read_bytes``.

    ``lease_margin_s`` is the consumer's estimate of how long a read may take: a lease must last that long for a read to start.
    The bounds of the quarantine are those of ``QuarantineBounds``.
    """

    transfer_deadline_s: float
    transfer_stall_s: float = 5.0
    breaker: BreakerTerms = field(default_factory=BreakerTerms)
    handshake_timeout_s: float
    lease_renew_interval_s: float
    lease_margin_s: float = 0.0
    kv_verify: KVVerify = "auto"
    max_quarantined_blocks: int = 1024
    max_quarantined_blocks_in_total: int = 2048
    fence_grace_s: float = 1.0
    max_read_bytes: int = 16 << 20
    max_read_bytes_by: Mapping[str, int] = field(default_factory=dict)  # transport; not where blocks are converted
    max_reads_in_flight: int = 4  # per load
    unsealed_patience_s: float = 0.0  # how long blocks without a seal are read again


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How an agent reads, and how long it keeps blocks for consumers."""

    pull: PullSettings
    leases: LeaseTerms


def agent_settings(
    config: TransferSettings, num_blocks: int, *, is_on_device: bool = False, unsealed_patience_s: float = 0.0
) -> AgentSettings:
    """Return the settings of an agent whose pool has ``num_blocks`` blocks, in host memory or on a device."""
    max_quarantined_blocks = config.max_quarantined_blocks or max(1, num_blocks // 4)
    return AgentSettings(
        pull=PullSettings(
            transfer_deadline_s=config.transfer_deadline_s,
            transfer_stall_s=config.transfer_stall_s,
            breaker=BreakerTerms(
                retry_s=config.transport_retry_s,
                retry_max_s=config.transport_retry_max_s,
                probe_timeout_s=config.transfer_stall_s,
            ),
            handshake_timeout_s=config.handshake_timeout_s,
            lease_renew_interval_s=config.lease_renew_interval_s,
            lease_margin_s=min(LEASE_MARGIN_S, config.lease_renew_interval_s / 2),
            kv_verify=config.kv_verify,
            unsealed_patience_s=unsealed_patience_s,
            max_quarantined_blocks=max_quarantined_blocks,
            max_quarantined_blocks_in_total=max(max_quarantined_blocks, num_blocks // 2),
            max_read_bytes=READ_BYTES,
            max_read_bytes_by=DEVICE_READ_BYTES if is_on_device else HOST_READ_BYTES,
        ),
        leases=LeaseTerms(config.lease_s, min(RENEWAL_S, config.lease_s), config.lease_max_s),
    )
