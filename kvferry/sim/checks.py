"""The invariants of a simulated worker, checked whenever they could be violated.

- Every row that a transport writes belongs to the block of the load that asked for it, or is quarantined: it has not been
  freed, reallocated or prepared for recomputing since the read was posted.
- After every turn of the engine the KV cache is consistent: no block lost or owned twice (``core.kv.invariants``).
- Every prefix hit and every sealed block holds the right content, whether or not it has been used. While steps are in flight
this holds for sealed blocks only, because blocks that the steps compute may be hits already.
- A sleeping engine has no work that it could do, and an engine without work sleeps.
- No running request is preempted while blocks are held for prompts that are read early.
- A block that a tier stores is kept in the pool until it has been read.

``WorkerChecks`` sees one incarnation of a worker. ``Oracle`` has the true content of a cache, by block hash.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from connectors.ec.jobs import FetchingMetadata
from connectors.multi.scheduler import MultiKVConnectorMetadata
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.transport.interface import SEAL_REGION
from connectors.tier.messages import TierConnectorMetadata
from core.constants import HASH_BLOCK_SIZE
from core.kv.hashing import BlockHasher
from core.kv.invariants import find_violations
from core.kv.seals import BROKEN, decode_seal
from core.request import ModelRunnerOutput, RequestStatus, SchedulerOutput, extra_keys_of
from core.sched.scheduler import Scheduler
from core.testing.hash_model import SLOT_BYTES, HashAttention, HashModel, expected_kv
from kvferry.sim.connector import SimConnector
from kvferry.sim.plan import RequestPlan
from kvferry.sim.pool_checks import PoolChecks
from kvferry.sim.tier import SimTier
from kvferry.sim.timing_checks import TimingChecks

_MAX_EMPTY_STEPS = 100  # in a row: each runs because of a report


class Oracle:
    """The content of a run's blocks without faults, by hash and group, for blocks of any size."""

    def __init__(self, requests: Iterable[RequestPlan], fingerprint: bytes, attentions: Sequence[HashAttention]) -> None:
        self._entries: dict[bytes, tuple[tuple[bytes, ...], int]] = {}  # per group, of a sequence; the hash's end
        self._hasher = BlockHasher(fingerprint, HASH_BLOCK_SIZE)
        self._attentions = attentions
        for request in requests:
            self._add(request)

    def find(self, block_hash: bytes, group_id: int, block_size: int) -> bytes | None:
        """Return the content of a block from its first slot to its last filled one."""
        known = self._entries.get(block_hash)
        if known is None:
            return None
        entries, end = known
        start = (end - 1) // block_size * block_size
        return entries[group_id][start * SLOT_BYTES : end * SLOT_BYTES]

    def _add(self, request: RequestPlan) -> None:
        tokens = array("i", request.prompt_token_ids + request.expected)
        extra = extra_keys_of(request.mm_features, request.cache_salt)
        chain = self._hasher.hash_request_blocks(tokens, extra)
        inputs = request.input_ids
        entries = tuple(expected_kv(inputs, self._attentions, group_id) for group_id in range(len(self._attentions)))
        for end in {*range(HASH_BLOCK_SIZE, len(tokens) + 1, HASH_BLOCK_SIZE), len(request.prompt_token_ids)}:
            self._entries[self._hasher.prefix_hash(chain, tokens, end, extra)] = entries, end


def _achieves_something(output: SchedulerOutput) -> bool:
    has_news = any(not metadata.is_empty() for metadata in _messages(output)) or _moves_embeddings(output)
    return bool(output.total_num_scheduled_tokens or output.preempted_req_ids or output.finished_req_ids) or has_news


def _moves_embeddings(output: SchedulerOutput) -> bool:
    metadata = output.ec_connector_metadata
    return isinstance(metadata, FetchingMetadata) and (metadata.has_orders or bool(metadata.loads))


def _messages(output: SchedulerOutput) -> list[P2PConnectorMetadata | TierConnectorMetadata]:
    """Return the message of a step to each connector."""
    metadata = output.kv_connector_metadata
    parts = metadata.metadata if isinstance(metadata, MultiKVConnectorMetadata) else (metadata,)
    return [part for part in parts if isinstance(part, P2PConnectorMetadata | TierConnectorMetadata)]


def _may_load(status: RequestStatus) -> bool:
    return status is RequestStatus.WAITING_FOR_REMOTE_KVS or status.is_finished


class WorkerChecks:
    """The checks of one incarnation. ``complain`` receives violations."""

    def __init__(self, name: str, oracle: Oracle, complain: Callable[[str], None]) -> None:
        self.complain = complain
        self._name = name
        self._oracle = oracle
        self._loading: dict[int, int] = {}  # local block → generation that a load was allowed to write
        self._reads: dict[int, dict[int, int]] = {}  # open read → the same, at its posting
        self._known_quarantined: set[int] = set()
        self._num_empty_steps = 0  # since the last one that did something
        self._num_preemptions = 0
        self.num_quarantined = 0  # blocks, over time
        self.num_pinned = 0  # by steps in flight, over time

    def attach(
        self,
        scheduler: Scheduler,
        model: HashModel,
        times: TimingChecks,
        tier: SimTier | None = None,
        connector: SimConnector | None = None,
    ) -> None:
        """Set the objects to check."""
        self._scheduler = scheduler
        self._model = model
        self._times = times
        self._tier = tier
        self._connector = connector
        PoolChecks(self._name, scheduler.kv_cache_manager, self.complain)

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def on_post(self, handle: int, region: int, local_rows: Sequence[int]) -> None:
        """Record the generations of the blocks that the read may write."""
        if region == 0:
            self._reads[handle] = {row: self._generation_to_write(row) for row in local_rows}
        elif region == SEAL_REGION and any(decode_seal(self._model.seals.row(row)) is not None for row in local_rows):
            self.complain(f"{self._name}: seals are going to be read into rows that hold old ones")

    def _generation_to_write(self, block_id: int) -> int:
        """Return the generation that a load was given; or the present one, if the load ended before its read began."""
        if block_id in self._scheduler.quarantined:
            return self._scheduler.kv_cache_manager.block_pool.blocks[block_id].generation
        return self._loading.get(block_id, -1)

    def on_end(self, handle: int) -> None:
        """Forget a read that is terminal."""
        self._reads.pop(handle, None)

    def on_landing(self, handle: int, region: int, local_row: int) -> None:
        """Check that the block still belongs to the load, or is free."""
        if region:
            return
        self._times.on_landing(local_row)
        block = self._scheduler.kv_cache_manager.block_pool.blocks[local_row]
        allowed = self._reads[handle][local_row]
        if block.generation != allowed or block.ref_cnt == 0:
            self.complain(f"{self._name}: a transfer wrote {block}, of which it may only write generation {allowed}")
        elif not self._may_be_written(local_row):
            self.complain(f"{self._name}: a transfer wrote {block}, which is neither loading nor quarantined")

    def on_conversion(self, block_id: int) -> None:
        """Check that a block that is filled from the staging area still belongs to the load, or is free."""
        block = self._scheduler.kv_cache_manager.block_pool.blocks[block_id]
        if block.generation != self._generation_to_write(block_id) or block.ref_cnt == 0 or not self._may_be_written(block_id):
            self.complain(f"{self._name}: {block} was filled from the staging area, which it may not be")

    def on_saving(self, block_id: int) -> None:
        """Check that a block that is read to be stored is pinned for it: it cannot be reused meanwhile."""
        block = self._scheduler.kv_cache_manager.block_pool.blocks[block_id]
        if block.ref_cnt == 0 or self._tier is None or block_id not in self._tier.saving_block_ids():
            self.complain(f"{self._name}: {block} is read to be stored without a pin")

    def _may_be_written(self, block_id: int) -> bool:
        """True if the block is quarantined, or its request loads, or has loaded and waits for the end of its load."""
        scheduler = self._scheduler
        if block_id in self._scheduler.quarantined:
            return True
        manager = scheduler.kv_cache_manager
        holders = [
            request
            for request in scheduler.requests.values()
            if any(block_id in table for table in manager.get_block_ids(request.request_id))
        ]
        return bool(holders) and all(_may_load(request.status) for request in holders)

    # ---- engine ------------------------------------------------------------------------------------------------------

    def on_scheduled(self, step: SchedulerOutput) -> None:
        """Record the blocks that the loads of this step may write."""
        self._times.on_scheduled(step)
        is_empty = not _achieves_something(step)
        self._num_empty_steps = self._num_empty_steps + 1 if is_empty else 0
        if self._num_empty_steps > _MAX_EMPTY_STEPS:
            self.complain(f"{self._name}: {self._num_empty_steps} steps in a row that do nothing: it should sleep")
        self._check_preemptions()
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        for metadata in _messages(step):
            if isinstance(metadata, P2PConnectorMetadata):
                rows = [row for pull in metadata.pulls for row in pull.local_rows]
            else:
                rows = [row for job in metadata.loads for row in job.block_ids]
            self._loading.update({row: blocks[row].generation for row in rows})

    def _check_preemptions(self) -> None:
        state = self._scheduler.state
        if state.num_preemptions > self._num_preemptions and state.early_pulls.rounds():
            self.complain(f"{self._name}: a request was preempted while blocks were held for prompts that are read early")
        self._num_preemptions = state.num_preemptions

    def on_settled(self) -> None:
        """Check everything that must hold between two turns."""
        scheduler = self._scheduler
        held = Counter(self._scheduler.quarantined)
        held.update(self._tier.saving_block_ids() if self._tier is not None else ())
        held.update(scheduler.pinned)
        held.update(self._connector.pinned() if self._connector is not None else ())
        self.num_pinned += len(scheduler.pinned)
        for violation in find_violations(scheduler.kv_cache_manager, held):
            self.complain(f"{self._name}: {violation}")
        self._follow_quarantine()
        self._check_content()

    def on_asleep(self) -> None:
        """A sleeping engine has no work: the step that it skips would change nothing and report nothing."""
        tier = self._tier
        if tier is not None and (tier.is_lazy or tier.has_unread_answer or tier.has_old_answer):
            return  # a lazy tier saves the blocks of the last step with the next one; an answer wakes the engine
        output = self._scheduler.schedule()
        if _achieves_something(output) or self._scheduler.update_from_output(output, ModelRunnerOutput()):
            self.complain(f"{self._name}: asleep, although there is a step to make: {output}")

    def _follow_quarantine(self) -> None:
        """A loading block gets another generation when it enters quarantine; the read may still write it."""
        blocks, quarantined = self._scheduler.kv_cache_manager.block_pool.blocks, self._scheduler.quarantined
        for rows in self._reads.values():
            for row in rows.keys() & quarantined - self._known_quarantined:
                rows[row] = blocks[row].generation
        self.num_quarantined += len(quarantined - self._known_quarantined)
        self._known_quarantined = set(quarantined)

    def _check_content(self) -> None:
        """Compare each hashed and each sealed block with the truth. Steps in flight hash their blocks before filling them."""
        seals = self._model.seals
        has_computed = not self._scheduler.state.inflight_steps
        for block in self._scheduler.kv_cache_manager.block_pool.blocks[1:]:
            if block.block_hash is not None and has_computed:
                self._compare(block.block_id, block.block_hash, block.group_id, "is a hit")
            sealed = seals.sealed_generation(block.block_id)
            if sealed == BROKEN:
                continue
            seal = decode_seal(seals.row(block.block_id))
            if seal is None or sealed != block.generation or seal.incarnation != seals.incarnation:
                self.complain(f"{self._name}: {block} is sealed as {seal}")
            else:
                self._compare(block.block_id, seal.block_hash, seal.group_id, "is sealed")

    def _compare(self, block_id: int, block_hash: bytes, group_id: int, how: str) -> None:
        content = self._oracle.find(block_hash, group_id, self._model.block_size)
        if content is None:
            self.complain(f"{self._name}: block {block_id} {how} as {block_hash.hex()}, which no request has")
        elif self._model.rows[block_id, : len(content)].tobytes() != content:
            self.complain(f"{self._name}: block {block_id} {how}, but its content is wrong")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def leftovers(self) -> list[str]:
        """Return what should have been freed after every request has ended and time has passed."""
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        found = []
        if scheduler.requests:
            found.append(f"requests {sorted(scheduler.requests)}")
        if self._scheduler.quarantined:
            found.append(f"quarantined blocks {sorted(self._scheduler.quarantined)}")
        if pool.num_free_blocks != pool.num_usable_blocks:
            found.append(f"{pool.num_usable_blocks - pool.num_free_blocks} blocks in use")
        return [f"{self._name}: {what} left" for what in found]
