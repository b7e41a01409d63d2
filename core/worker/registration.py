"""A worker's registration at routers, and its admission limits.

Owns which settings and properties of the model a router learns. Pure.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from core.config import KVFerryConfig
from core.connector import WorkerContext
from core.release import package_version
from core.wire.messages import Register, RegisterEncoder, Role
from core.worker.actions import AdmissionLimits
from core.worker.builder import Assembled, BuiltEncoder


def registration(context: WorkerContext, assembled: Assembled, ops_address: str) -> Register | RegisterEncoder:
    """Return the worker's registration."""
    config, built, connector, ec_connector = context.config, assembled.built, assembled.connector, assembled.ec_connector
    if isinstance(built, BuiltEncoder):
        assert ec_connector is not None, "its embeddings could not be read"
        return RegisterEncoder(
            engine_id=context.engine_id,
            incarnation=context.incarnation,
            model=config.model.served_name or config.model.name,
            model_fingerprint=built.model_fingerprint,
            ec_connector=ec_connector.name,
            max_num_images=built.max_num_images,
            host_id=ec_connector.host_id,
            ops_address=ops_address,
            pid=os.getpid(),
            version=package_version(),
        )
    reads_early = may_read_early(context.role, config, can_switch_role=context.can_switch_role)
    return Register(
        engine_id=context.engine_id,
        incarnation=context.incarnation,
        role=context.role,
        model=config.model.served_name or config.model.name,
        model_fingerprint=built.model_fingerprint,
        layout=built.layout,
        max_model_len=built.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_blocks=built.num_blocks,
        max_num_choices=config.scheduler.max_num_seqs + config.worker.max_waiting_requests,
        connector=config.connector.name if connector is not None else "",
        transports=connector.transports if connector is not None else (),
        host_id=connector.host_id if connector is not None else ec_connector.host_id if ec_connector is not None else "",
        kv_verify=config.connector.kv_verify,
        has_digests=connector is not None and connector.has_digests,
        prefix_address=connector.prefix_address if connector is not None else "",
        reads_early=reads_early and connector is not None and connector.scheduler.reads_early,
        control_address=connector.control_address if connector is not None else "",
        meets_producers=connector is not None and connector.meets_producers,
        ops_address=ops_address,
        pid=os.getpid(),
        ec_connector=ec_connector.name if ec_connector is not None else "",
        version=package_version(),
        has_patience=config.scheduler.policy == "priority",
        has_fair_shares=True,
        content_parts=built.contents.parts if built.contents is not None else (),
        start_ms=round(1e3 * _process_age_s()),
        is_supervised=config.worker.is_supervised,
        can_switch_role=context.can_switch_role,
        home_role=context.role,
    )


def may_read_early(role: Role, config: KVFerryConfig, *, can_switch_role: bool) -> bool:
    """Return True if the worker, in its role or a later one, may read prompts while they are computed.

    It finds what it has read in its prefix cache.
    """
    decodes = role == "decode" or can_switch_role
    return decodes and config.connector.early_pull and config.cache.enable_prefix_caching


def admission_limits(context: WorkerContext, assembled: Assembled) -> AdmissionLimits:
    """Return how many choices, or images, the worker holds at most, and how long it takes to leave."""
    config, built = context.config, assembled.built
    if isinstance(built, BuiltEncoder):
        return AdmissionLimits(
            max_num_seqs=built.max_num_images, max_waiting_requests=0, drain_timeout_s=config.worker.drain_timeout_s
        )
    return AdmissionLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_waiting_requests=config.worker.max_waiting_requests,
        drain_timeout_s=config.worker.drain_timeout_s,
    )


def _process_age_s() -> float:
    """Return how long ago this process was started; see proc_pid_stat(5), field 22."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from field 3 on
    started_at = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_at)
