"""A KV connector whose answers are written by a test, for a ``HashModel``.

``Script`` is the test's view of both sides; the two classes play it to the scheduler and to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from core.connector import KVConnectorScheduler, KVConnectorWorker
from core.kv.block import NULL_BLOCK_ID
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.kv.pool_region import KVPoolRegion
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, RequestStatus, SchedulerOutput
from core.testing.hash_model import FULL, HashAttention, expected_kv
from core.wire.kv import KVHandoff


@dataclass
class Remote:
    """The connector's answer for a request: ``num_tokens`` of its sequence can be loaded; None = ask later."""

    num_tokens: int | None
    is_async: bool = True
    is_corrupt: bool = False  # a synchronous load brings garbage and reports the blocks


@dataclass
class ScriptedLoad:
    """A load that the worker side has to start."""

    request_id: str
    token_ids: list[int]
    tables: tuple[list[int], ...]  # per group
    start: int
    end: int
    is_async: bool
    is_corrupt: bool

    @property
    def block_ids(self) -> list[int]:
        """The table of the first group."""
        return self.tables[0]


@dataclass
class LoadMetadata(KVConnectorMetadata):
    """The loads that one step starts, and the requests that have left."""

    loads: list[ScriptedLoad]
    finished_req_ids: set[str]


@dataclass
class Script:
    """Both sides of the fake connector, for the test."""

    remote: dict[str, Remote] = field(default_factory=dict)
    keep: set[str] = field(default_factory=set)  # blocks are kept when these finish
    handoffs: dict[str, KVHandoff] = field(default_factory=dict)
    has_pending_block_frees: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    loading: dict[str, ScriptedLoad] = field(default_factory=dict)
    report: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    attentions: Sequence[HashAttention] = FULL

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of the calls of one method, in order."""
        return [call[1:] for call in self.calls if call[0] == name]


class ScriptedScheduler(KVConnectorScheduler):
    """Answers by the script, and records every call."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.loads: list[ScriptedLoad] = []
        self.wanted: dict[str, Remote] = {}

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """See the interface."""
        self.script.calls.append(("bind", manager))

    def on_new_request(self, request: Request) -> None:
        """See the interface."""
        self.script.calls.append(("on_new_request", request.request_id))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the interface."""
        self.script.calls.append(("match", request.request_id, num_computed_tokens))
        remote = self.script.remote.get(request.request_id)
        if remote is None:
            return 0, False
        if remote.num_tokens is None:
            return None, False
        num_external = max(0, remote.num_tokens - num_computed_tokens)
        return num_external, remote.is_async and num_external > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the interface."""
        self.script.calls.append(("alloc", request.request_id, num_external_tokens, len(blocks.get_block_ids()[0])))
        if num_external_tokens:
            # Like NIXL: a handoff is consumed by its first load.
            remote = self.script.remote.pop(request.request_id)
            assert remote.num_tokens is not None, "it was offered"
            start = remote.num_tokens - num_external_tokens if remote.is_async else None
            if start is None:  # a synchronous load may have been cut to leave the last token
                start = min(remote.num_tokens, request.num_tokens - 1) - num_external_tokens
            self.loads.append(
                ScriptedLoad(
                    request.request_id,
                    request.all_token_ids.tolist(),
                    blocks.get_block_ids(),
                    start,
                    start + num_external_tokens,
                    remote.is_async,
                    remote.is_corrupt,
                )
            )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LoadMetadata:
        """See the interface."""
        self.script.calls.append(("meta", set(scheduler_output.finished_req_ids), len(self.loads)))
        loads, self.loads = self.loads, []
        return LoadMetadata(loads, set(scheduler_output.finished_req_ids))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """See the interface."""
        self.script.calls.append(("update",))

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """See the interface."""
        self.script.calls.append(("finished", request.request_id, block_ids, request.status))
        if request.request_id in self.script.keep and request.status < RequestStatus.FINISHED_ABORTED:
            return True, self.script.handoffs.get(request.request_id)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """See the interface."""
        return self.script.has_pending_block_frees


class ScriptedWorker(KVConnectorWorker):
    """Writes synchronous loads at once, asynchronous ones when the test orders it."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """See the interface."""
        self.pool = pool

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """See the interface."""
        assert isinstance(metadata, LoadMetadata)
        for load in metadata.loads:
            if load.is_async:
                self.script.loading[load.request_id] = load
            else:
                self.write(load, load.is_corrupt)

    def write(self, load: ScriptedLoad, is_corrupt: bool) -> None:
        """Put the KV of tokens [start, end) into the blocks, or garbage."""
        buffer, block_size = self.pool.buffer, self.pool.layout.block_size
        assert buffer is not None
        slot_bytes = self.pool.block_bytes // block_size
        for group_id, table in enumerate(load.tables):
            kv = expected_kv(load.token_ids[: load.end], self.script.attentions, group_id)
            for position in range(load.start, load.end):
                block_id = table[position // block_size]
                if block_id == NULL_BLOCK_ID:
                    continue
                entry = b"garbage!" if is_corrupt else kv[position * slot_bytes : (position + 1) * slot_bytes]
                at = block_id * self.pool.block_bytes + position % block_size * slot_bytes
                buffer[at : at + slot_bytes] = entry
            if is_corrupt:
                first, last = load.start // block_size, -(-load.end // block_size)
                self.script.report.invalid_block_ids |= set(table[first:last]) - {NULL_BLOCK_ID}

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """See the interface."""
        report, self.script.report = self.script.report, KVConnectorOutput()
        return report
