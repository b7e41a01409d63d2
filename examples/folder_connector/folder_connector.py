"""A KV connector of one's own: blocks go from prefill to decode workers through files in a folder that both see.

One handoff is one file: each block, followed by its digest. A rename makes it appear whole; until then its reader waits. It is
deleted once it is older than ``connector.lease_s``, by any prefill worker. docs/connectors.md explains each step.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from connectors.handoff_scheduler import HandoffScheduler, Offer
from connectors.reports import ALL_BLOCKS, LoadEnded, SendingEnded
from connectors.thread_worker import StepOrders, ThreadWorker
from core.connector import Connector, ConnectorContext
from core.errors import ConfigError, ConnectorUnavailable, CorruptBlock, KVFerryError, PeerUnreachable, TransferTimeout
from core.kv.manager import KVCacheBlocks
from core.log import event
from core.request import Request
from core.wire.kv import KVHandoff
from core.wire.messages import ErrorInfo, TransferUsage

NAME = "folder"
DIGEST_BYTES = 16
POLL_S = 0.005  # how often a reader looks for a file that is not there yet
hash_of = partial(hashlib.blake2b, digest_size=DIGEST_BYTES)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Save:
    """Write the blocks of a handoff."""

    request_id: str
    handoff: KVHandoff


@dataclass(frozen=True, slots=True)
class Load:
    """Read the blocks of a handoff, from the ``first`` one on, into these blocks of the pool."""

    request_id: str
    transfer_id: str
    num_tokens: int
    first: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Delete the files of handoffs."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Renew:
    """Make the files of handoffs young again."""

    transfer_ids: tuple[str, ...]


# ``LoadEnded`` is only reported; a string is a request whose load is aborted
Order = Save | Load | LoadEnded | Release | Renew | str


class FolderScheduler(HandoffScheduler[StepOrders[Order]]):
    """Turns decisions of the base into orders; touches no file."""

    def start_save(self, request_id: str, handoff: KVHandoff) -> None:
        """Write the file of the handoff."""
        self.step.orders.append(Save(request_id, handoff))

    def start_load(self, request: Request, offer: Offer, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Read what is no local hit."""
        first = (offer.handoff.num_tokens - num_tokens) // offer.handoff.layout.block_size
        block_ids = tuple(blocks.get_block_ids()[0][first : len(offer.block_hashes)])
        self.step.orders.append(Load(request.request_id, offer.handoff.transfer_id, num_tokens, first, block_ids))

    def refuse_load(self, request_id: str, error: KVFerryError) -> None:
        """Report the load as failed."""
        self.step.orders.append(LoadEnded(request_id, TransferUsage(transport=NAME), ErrorInfo.of(error), ALL_BLOCKS))

    def abort_load(self, request_id: str) -> None:
        """Stop waiting for the file."""
        self.step.orders.append(request_id)


class FolderWorker(ThreadWorker[Order, LoadEnded | SendingEnded]):
    """Writes, reads and deletes files on the thread of the base; the engine never waits for it."""

    def __init__(self, context: ConnectorContext, folder: Path) -> None:
        super().__init__(NAME)
        self._context, self._settings, self._folder = context, context.config.connector, folder
        self._waiting: dict[str, tuple[float, Load]] = {}  # start and load by request id, until the file is there
        self._clear_at = 0.0 if context.role == "prefill" else float("inf")

    def carry_out(self, order: Order) -> None:
        """Begin what an order says."""
        match order:
            case Save():
                self._save(order)
            case Load():
                self._waiting[order.request_id] = (self._context.clock.now(), order)
            case LoadEnded():
                self.report(order)
            case Release() | Renew():
                self._touch(order)
            case str() if self._waiting.pop(order, None) is not None:
                self.report(LoadEnded(order, None))

    def poll(self) -> float:
        """Look for files that are waited for, and clear the folder; return after how many seconds to do so again."""
        for started_at, load in list(self._waiting.values()):
            self._look_for_file(started_at, load)
        if (now := self._context.clock.now()) >= self._clear_at:
            self._clear_at = now + self._settings.lease_s / 2
            try:
                self.clear()
            except OSError as error:
                logger.warning(event("kv_folder_not_cleared", error=repr(error)))
        return POLL_S if self._waiting else self._settings.lease_s / 2

    def _save(self, save: Save) -> None:
        """Write the file. If that fails, its reader finds none in time and says so."""
        path = file_of(self._folder, save.handoff.transfer_id)
        draft = path.with_suffix(".draft.kv")
        try:
            with draft.open("wb") as file:
                for block_id in save.handoff.groups[0].block_ids:
                    (block,) = self.blocks.read([block_id])
                    file.writelines((block, hash_of(block).digest()))
            draft.rename(path)
        except OSError as error:
            logger.error(event("kv_save_failed", transfer_id=save.handoff.transfer_id, error=repr(error)))
        self.report(SendingEnded(save.request_id))

    def _look_for_file(self, started_at: float, load: Load) -> None:
        """Load the file if it is there, and report how that ended. Bad blocks are computed again, the others used."""
        error: KVFerryError | None = None
        bad: tuple[int, ...] = ()
        try:
            bad = self._read(load)
            error = CorruptBlock(f"{len(bad)} blocks of {load.transfer_id} are not what was written") if bad else None
        except FileNotFoundError:
            if self._context.clock.now() <= started_at + self._settings.transfer_deadline_s:
                return
            error = TransferTimeout(f"no file of {load.transfer_id} after {self._settings.transfer_deadline_s:g} s")
        except OSError as problem:
            error = PeerUnreachable(f"{load.transfer_id}: {problem}")
        del self._waiting[load.request_id]
        num_read = len(load.block_ids) if error is None or bad else 0
        usage = TransferUsage(
            transport=NAME,
            transferred_tokens=load.num_tokens if num_read else 0,
            transferred_bytes=num_read * self._context.layout.block_bytes,
            transfer_ms=1e3 * (self._context.clock.now() - started_at),
            verified_blocks=num_read - len(bad),
        )
        invalid = () if error is None else bad or ALL_BLOCKS
        self.report(LoadEnded(load.request_id, usage, ErrorInfo.of(error) if error else None, invalid))

    def _read(self, load: Load) -> tuple[int, ...]:
        """Read the file into the pool; return the blocks that do not hold what was written. Raises OSError."""
        bad: list[int] = []
        with file_of(self._folder, load.transfer_id).open("rb") as file:
            file.seek(load.first * (self._context.layout.block_bytes + DIGEST_BYTES))

            def fill(block: memoryview) -> None:
                if file.readinto(block) < len(block) or file.read(DIGEST_BYTES) != hash_of(block).digest():
                    bad.append(block_id)

            for block_id in load.block_ids:
                self.blocks.write(block_id, fill)
            self.blocks.finish_writes()
        return tuple(bad)

    def _touch(self, order: Release | Renew) -> None:
        """Delete files or make them young again, those that are there; the others go by their age."""
        for transfer_id in order.transfer_ids:
            path = file_of(self._folder, transfer_id)
            try:
                if isinstance(order, Release):
                    path.unlink()
                else:
                    os.utime(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning(event("kv_file_not_touched", transfer_id=transfer_id, error=repr(error)))

    def clear(self) -> None:
        """Delete what is older than a lease, by the file system's clock. Raises OSError."""
        probe = file_of(self._folder, self._context.engine_id).with_suffix(".now.kv")
        probe.touch()
        oldest = probe.stat().st_mtime - self._settings.lease_s
        probe.unlink()
        for path in self._folder.glob("*.kv"):
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                if path.stat().st_mtime < oldest:
                    path.unlink()


def file_of(folder: Path, transfer_id: str) -> Path:
    """Return the file of a handoff; no id leads out of the folder."""
    return folder / f"{hash_of(transfer_id.encode()).hexdigest()}.kv"


class FolderConnector(Connector):
    """Makes both sides; passes on to the thread what routers want."""

    def __init__(self, context: ConnectorContext) -> None:
        section = context.config.connector
        folder = section.extra.get("folder")
        if not isinstance(folder, str) or not folder:
            raise ConfigError("connector.extra.folder: name a folder for all workers", param="connector.extra.folder")
        if context.layout.num_groups != 1:
            raise ConnectorUnavailable("the folder connector is for models whose layers are all alike")
        self._folder = Path(folder)
        self.scheduler = FolderScheduler(context, StepOrders, lease_ms=int(1000 * section.lease_s), ids=context.ids)
        self.worker: FolderWorker = FolderWorker(context, self._folder)

    async def start(self) -> None:
        """Make the folder, see that it can be written, and start the thread. Raises ConnectorUnavailable."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.worker.clear()
        except OSError as error:
            raise ConnectorUnavailable(f"connector.extra.folder: {error}") from None
        self.worker.start()

    async def stop(self) -> None:
        """End the thread."""
        await self.worker.stop()

    def release(self, transfer_ids: Sequence[str]) -> None:
        """Let the thread delete files that will not be read: the event loop must not wait for a disk."""
        self.worker.submit(Release(tuple(transfer_ids)))

    def renew(self, transfer_ids: Sequence[str]) -> None:
        """Let the thread make files young again."""
        self.worker.submit(Renew(tuple(transfer_ids)))
