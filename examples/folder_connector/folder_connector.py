"""A KV connector of one's own: blocks go from prefill to decode workers through files in a folder that both see.

    pip install examples/folder_connector
    kvferry serve --set connector.name=folder --set connector.extra.folder=/mnt/shared/kv

A connector has two sides that share nothing but messages. The *scheduler side* decides: what is kept for a reader, what can be
loaded. The *worker side* moves bytes; the engine calls it in every step, so it only queues work for a thread and reports what
has ended. Both are called on the engine's thread; ``FolderConnector`` ties them to the worker's event loop.

One handoff is one file: the blocks, then a digest of each. It appears by a rename, so it is whole when it is there; until
then its reader waits. It is deleted once it is older than ``connector.lease_s``, also if another worker wrote it.

What a connector must do in all cases is in ``connectors.testing.connector_suite``; ``tests/examples/test_folder_connector.py``
shows how to run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.clock import Clock
from core.connector import Connector, ConnectorContext, KVConnectorScheduler, KVConnectorWorker
from core.errors import (
    ConfigError,
    ConnectorUnavailable,
    CorruptBlock,
    EngineDead,
    KVFerryError,
    LayoutMismatch,
    PeerUnreachable,
    StaleBlock,
    TransferTimeout,
)
from core.ids import new_hex_id
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.kv.pool_region import KVPoolRegion
from core.kv.spec import ceil_div
from core.log import event
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, RequestStatus, SchedulerOutput
from core.wire.kv import GroupBlocks, KVHandoff
from core.wire.messages import ErrorInfo, TransferUsage

NAME = "folder"
DIGEST_BYTES = 16
POLL_S = 0.005  # how often a reader looks for a file that is not there yet
ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

logger = logging.getLogger(__name__)


# ---- from the scheduler side to the worker side ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Save:
    """Write these rows of the pool; then the request's blocks are free."""

    request_id: str
    transfer_id: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read the blocks of a handoff, from the ``first``-th on, into these rows. ``refusal`` is why it must not be done."""

    request_id: str
    transfer_id: str
    num_tokens: int
    first: int
    rows: tuple[int, ...]
    refusal: KVFerryError | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Nobody wants this load any more; its blocks are free once it is reported as ended."""

    request_id: str


Job = Save | Load | Abort


@dataclass(slots=True)
class FolderMetadata(KVConnectorMetadata):
    """One step's jobs."""

    jobs: list[Job] = field(default_factory=list)


# ---- scheduler side --------------------------------------------------------------------------------------------------


class FolderScheduler(KVConnectorScheduler):
    """Decides what is written and what is read; touches no file."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._hasher = BlockHasher(context.model_fingerprint)
        self._manager: KVCacheManager | None = None
        self._offers: dict[str, KVHandoff] = {}  # by request id, until used once
        self._loading: set[str] = set()
        self._next = FolderMetadata()

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Keep the manager, for the generations of blocks."""
        self._manager = manager

    def on_new_request(self, request: Request) -> None:
        """Remember the handoff that a request brings."""
        if request.kv_handoff is not None:
            self._offers[request.request_id] = request.kv_handoff

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer what the handoff has beyond the local hits. One that must not be read is offered too: its load fails."""
        handoff = self._offers.get(request.request_id)
        if handoff is None:
            return 0, False
        num_tokens = request.num_prompt_tokens if self._refusal(request, handoff) else handoff.num_tokens
        count = max(0, num_tokens - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Ask for the blocks behind the local hits."""
        handoff = self._offers.pop(request.request_id, None)
        if handoff is None or not num_external_tokens:
            return
        self._loading.add(request.request_id)
        num_tokens, block_size = handoff.num_tokens, self._context.layout.block_size
        first = (num_tokens - num_external_tokens) // block_size
        rows = tuple(blocks.get_block_ids()[0][first : ceil_div(num_tokens, block_size)])
        refusal = self._refusal(request, handoff)
        self._next.jobs.append(Load(request.request_id, handoff.transfer_id, num_tokens, first, rows, refusal))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Forget loads that have ended."""
        self._loading -= output.finished_recving

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Ship the jobs that have gathered."""
        metadata, self._next = self._next, FolderMetadata()
        return metadata

    def has_pending_push_work(self) -> bool:
        """True while a job waits for a step to take it along: without one, the engine would sleep on it."""
        return bool(self._next.jobs)

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """Keep the prompt's blocks of a request that a reader will go on with, until they are written."""
        self._offers.pop(request.request_id, None)
        if request.request_id in self._loading:
            self._loading.discard(request.request_id)
            self._next.jobs.append(Abort(request.request_id))
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens and any(block_ids)
        if not request.needs_handoff or request.status not in ENDED_WELL or not is_computed:
            return False, None
        handoff = self._describe(request, block_ids[0])
        self._next.jobs.append(Save(request.request_id, handoff.transfer_id, handoff.groups[0].block_ids))
        return True, handoff

    def _describe(self, request: Request, block_ids: list[int]) -> KVHandoff:
        assert self._manager is not None
        context, hashes = self._context, self._block_hashes(request, request.num_prompt_tokens)
        kept = block_ids[: len(hashes)]
        blocks = self._manager.block_pool.blocks
        generations = tuple(blocks[block_id].generation for block_id in kept)
        return KVHandoff(
            transfer_id=new_hex_id(context.ids, "folder-"),
            engine_id=context.engine_id,
            incarnation=context.incarnation,
            control_address="",
            model_fingerprint=context.model_fingerprint,
            layout=context.layout,
            groups=(GroupBlocks(group_id=0, block_ids=tuple(kept), generations=generations, block_hashes=hashes),),
            num_tokens=request.num_prompt_tokens,
            lease_ms=int(1000 * context.config.connector.lease_s),
        )

    def _block_hashes(self, request: Request, num_tokens: int) -> tuple[bytes, ...]:
        """Return the identity of the tokens up to the end of each block: equal only for the same model and the same prefix."""
        size = self._context.layout.block_size
        ends = [min(start + size, num_tokens) for start in range(0, num_tokens, size)]
        return tuple(
            self._hasher.prefix_hash(request.block_hashes, request.all_token_ids, end, request.extra_keys) for end in ends
        )

    def _refusal(self, request: Request, handoff: KVHandoff) -> KVFerryError | None:
        """Return why this handoff must not be read for this request: the reader's own hashes decide."""
        if handoff.layout != self._context.layout or handoff.model_fingerprint != self._context.model_fingerprint:
            return LayoutMismatch(f"the handoff is of {handoff.layout}, this worker has {self._context.layout}")
        is_in_range = 0 < handoff.num_tokens <= request.num_prompt_tokens and len(handoff.groups) == 1
        if not is_in_range or handoff.groups[0].block_hashes != self._block_hashes(request, handoff.num_tokens):
            return StaleBlock("the handoff is not for this prompt")
        return None


# ---- worker side -----------------------------------------------------------------------------------------------------


class FolderWorker(KVConnectorWorker):
    """Writes and reads files on a thread of its own. ``jobs`` go in, reports come out; the engine never waits."""

    def __init__(self, folder: Path, deadline_s: float, clock: Clock) -> None:
        self._folder = folder
        self._deadline_s = deadline_s
        self._clock = clock
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._reports: deque[KVConnectorOutput] = deque()
        self._waiting: dict[str, tuple[float, Load]] = {}  # by request id: start and load, until its file is there
        self._rows: list[memoryview] = []
        self._wakeup: Callable[[], None] = lambda: None
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kv-folder", daemon=True)

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Cut the pool into its rows.

        Raises:
            ConnectorUnavailable: the pool is not in host memory.
        """
        if pool.buffer is None:
            raise ConnectorUnavailable("the folder connector needs the KV pool in host memory")
        bytes_of = pool.block_bytes
        self._rows = [pool.buffer[start : start + bytes_of] for start in range(0, pool.num_blocks * bytes_of, bytes_of)]

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Keep the callback that wakes the engine."""
        self._wakeup = wakeup

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Queue the step's jobs."""
        assert isinstance(metadata, FolderMetadata)
        for job in metadata.jobs:
            self._jobs.put(job)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Report what ended since the last step.

        Raises:
            EngineDead: the thread has died; nothing will end any more.
        """
        if self._death is not None:
            raise EngineDead(f"the thread of the folder connector has died: {self._death!r}")
        output = KVConnectorOutput()
        while self._reports:
            report = self._reports.popleft()
            output.finished_sending |= report.finished_sending
            output.finished_recving |= report.finished_recving
            output.failed_recving |= report.failed_recving
            output.invalid_block_ids |= report.invalid_block_ids
            output.load_errors |= report.load_errors
            output.transfer_usage |= report.transfer_usage
        return output

    def start(self) -> None:
        """Start the thread; the pool is registered."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the job that it is at."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # ---- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # the thread's main loop: the engine must learn of it
            self._death = error
            self._wakeup()

    def _turn(self) -> bool:
        """Do one job, or look for files; returns False once there is nothing more to do."""
        try:
            job = self._jobs.get(timeout=POLL_S if self._waiting else None)
        except queue.Empty:
            self._look_for_files()
            return True
        match job:
            case Save():
                self._save(job)
            case Load():
                self._waiting[job.request_id] = (self._clock.now(), job)
                self._look_for_files()
            case Abort():
                if self._waiting.pop(job.request_id, None) is not None:
                    self._report(KVConnectorOutput(finished_recving={job.request_id}))
        return job is not None

    def _save(self, save: Save) -> None:
        """Write the file. If that fails, its reader finds none in time and says so."""
        path = file_of(self._folder, save.transfer_id)
        draft = path.with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                for row in save.rows:
                    file.write(self._rows[row])
                file.write(b"".join(digest(self._rows[row]) for row in save.rows))
            draft.rename(path)
        except OSError as error:
            logger.error(event("kv_save_failed", transfer_id=save.transfer_id, error=repr(error)))
        self._report(KVConnectorOutput(finished_sending={save.request_id}))

    def _look_for_files(self) -> None:
        for request_id, (started_at, load) in list(self._waiting.items()):
            now = self._clock.now()
            output = KVConnectorOutput(finished_recving={request_id})
            bad: list[int] = []
            try:
                found = self._load(load)
                if found is None and now <= started_at + self._deadline_s:
                    continue
                if found is None:
                    raise TransferTimeout(f"no file of {load.transfer_id} after {self._deadline_s:g} s")
                bad = found
            except KVFerryError as error:
                output.failed_recving[request_id] = ErrorInfo.of(error)
            except OSError as error:
                output.failed_recving[request_id] = ErrorInfo.of(PeerUnreachable(f"{load.transfer_id}: {error}"))
            if bad:  # the others may be used: the engine computes again from the first of these on
                error = CorruptBlock(f"{len(bad)} blocks of {load.transfer_id} are not what was written")
                output.invalid_block_ids.update(bad)
                output.load_errors[request_id] = ErrorInfo.of(error)
            num_good = 0 if output.failed_recving else len(load.rows) - len(bad)
            output.transfer_usage[request_id] = self._usage(load, num_good, self._clock.now() - started_at)
            del self._waiting[request_id]
            self._report(output)

    def _usage(self, load: Load, num_good_blocks: int, seconds: float) -> TransferUsage:
        """Return what a load cost; of one that has failed nothing was transferred, but it took its time."""
        if not num_good_blocks:
            return TransferUsage(transport=NAME, transfer_ms=1e3 * seconds)
        return TransferUsage(
            transport=NAME,
            transferred_tokens=load.num_tokens,
            transferred_bytes=len(load.rows) * self._rows[0].nbytes,
            transfer_ms=1e3 * seconds,
            verified_blocks=num_good_blocks,
        )

    def _load(self, load: Load) -> list[int] | None:
        """Read the file into the pool; return the rows that do not hold what was written, None if there is no file yet.

        Raises:
            KVFerryError: it must not be read.
            OSError: it cannot be read.
        """
        if load.refusal is not None:
            raise load.refusal
        try:
            file = file_of(self._folder, load.transfer_id).open("rb")
        except FileNotFoundError:
            return None
        with file:
            file.seek(load.first * self._rows[0].nbytes)
            counts = [file.readinto(self._rows[row]) for row in load.rows]
            file.seek(-DIGEST_BYTES * len(load.rows), os.SEEK_END)
            digests = [file.read(DIGEST_BYTES) for _ in load.rows]
        if any(count != self._rows[0].nbytes for count in counts):
            raise CorruptBlock(f"the file of {load.transfer_id} is too short")
        return [row for row, written in zip(load.rows, digests, strict=True) if digest(self._rows[row]) != written]

    def _report(self, report: KVConnectorOutput) -> None:
        self._reports.append(report)
        self._wakeup()


def digest(row: memoryview) -> bytes:
    """Return the digest of a block's bytes."""
    return hashlib.blake2b(row, digest_size=DIGEST_BYTES).digest()


def file_of(folder: Path, transfer_id: str) -> Path:
    """Return the file of a handoff; no id leads out of the folder."""
    return folder / f"{hashlib.blake2b(transfer_id.encode(), digest_size=DIGEST_BYTES).hexdigest()}.kv"


# ---- in the worker's event loop --------------------------------------------------------------------------------------


class FolderConnector(Connector):
    """Both sides, and the clearing of the folder."""

    def __init__(self, context: ConnectorContext) -> None:
        folder = context.config.connector.extra.get("folder")
        if not isinstance(folder, str) or not folder:
            raise ConfigError("connector.extra.folder: a folder that all workers see is needed", param="connector.extra.folder")
        if context.layout.num_groups != 1:
            raise ConnectorUnavailable("the folder connector is for models whose layers are all alike")
        self._folder = Path(folder)
        self._lease_s = context.config.connector.lease_s
        self._is_producer = context.role == "prefill"
        self._probe = self._folder / f"{file_of(self._folder, context.engine_id).stem}.now"
        self._clearing: asyncio.Task[None] | None = None
        self.scheduler = FolderScheduler(context)
        self.worker: FolderWorker = FolderWorker(self._folder, context.config.connector.transfer_deadline_s, context.clock)

    @property
    def transports(self) -> tuple[str, ...]:
        """None: the router pairs workers by the connector's name."""
        return ()

    async def start(self) -> None:
        """Start the thread, and the clearing where files are written.

        Raises:
            ConnectorUnavailable: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._probe.touch()
        except OSError as error:
            raise ConnectorUnavailable(f"connector.extra.folder: {error}") from None
        self.worker.start()
        if self._is_producer:
            self._clearing = asyncio.create_task(self._clear_for_ever())

    async def stop(self) -> None:
        """End thread and task."""
        if self._clearing is not None:
            self._clearing.cancel()
            await asyncio.gather(self._clearing, return_exceptions=True)
        await asyncio.to_thread(self.worker.stop)
        self._probe.unlink(missing_ok=True)

    def release(self, transfer_ids: Sequence[str]) -> None:
        """Delete files that will not be read; what cannot be deleted now, or is not there yet, goes by its age."""
        for transfer_id in transfer_ids:
            with contextlib.suppress(OSError):
                file_of(self._folder, transfer_id).unlink()

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Make files young again, those that are there."""
        for transfer_id in transfer_ids:
            with contextlib.suppress(FileNotFoundError):
                os.utime(file_of(self._folder, transfer_id))

    async def _clear_for_ever(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._clear)
            except OSError as error:
                logger.warning(event("kv_folder_not_cleared", error=repr(error)))
            await asyncio.sleep(self._lease_s / 2)

    def _clear(self) -> None:
        """Delete what is older than a lease, by the file system's clock."""
        self._probe.touch()
        oldest = self._probe.stat().st_mtime - self._lease_s
        for path in [*self._folder.glob("*.kv"), *self._folder.glob("*.draft")]:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def make_connector(context: ConnectorContext) -> Connector:
    """Build the connector of a worker (entry point ``kvferry.connectors`` → ``folder``)."""
    return FolderConnector(context)
