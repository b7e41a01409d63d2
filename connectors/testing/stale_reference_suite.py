"""Five references to KV that does not match them: none may change an output token. A test class to derive from.

    class TestMine(StaleReferenceSuite):
        def make_connector(self, worker):
            return my_connector(role=worker.role, incarnation=worker.incarnation, ...)

For authors of a connector, or of a transport for connector p2p (``tests/conformance/test_stale_references.py`` shows how that
one is built over any transport). The five cases are those in which other systems answered one user with another's text:

    1. a used reference: its owner does not hold the blocks any more
    2. a reference to blocks that the owner does not have
    3. a reference to blocks that the owner has meanwhile given to another prompt
    4. a reference of another incarnation of the owner
    5. a reference to another prompt's blocks

Where a connector would refuse a reference by a lease or a list of its own, the case comes a second time with a forged
reference, so that only the blocks themselves can reveal it.

Both workers are real engines, scheduler, KV cache and connector included, around a ``HashModel``: its "KV" is a hash of the
prefix, so a wrong block in any place shows in the tokens. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio

from connectors.testing.memory_pool import MemoryPool
from connectors.testing.stepping import call_if_open
from core.clock import SystemClock
from core.config_workers import SchedulerSection
from core.connector import Connector
from core.engine.core import EngineCore
from core.errors import fallback_reason
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.request import EngineCoreOutput, NewRequest
from core.sched.scheduler import Scheduler
from core.testing.hash_model import DEFAULT_VOCAB_SIZE, HashModel, expected_tokens, hash_model_kv_config, hash_model_layout
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import Role, TransferUsage
from core.wire.sampling import SamplingParams

FINGERPRINT = b"stale references"
BLOCK_SIZE = 16
LAYOUT = hash_model_layout(BLOCK_SIZE)
NUM_BLOCKS = 12  # the null block included: three prompts at most, so that blocks are reused soon
NUM_OUTPUT_TOKENS = 6
PROMPT = tuple(range(100, 155))  # three full blocks and a part of one
OTHER_PROMPT = tuple(range(300, 355))
PATIENCE_S = 30.0
REFUSALS = {fallback_reason("stale"), fallback_reason("protocol_error")}


@dataclass(frozen=True, slots=True)
class SuiteWorker:
    """The facts that a connector of the suite is made from."""

    role: Role
    incarnation: int
    model_fingerprint: bytes
    layout: KVLayoutInfo


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of a request, the place of its prompt's KV, and the effect of its handoff."""

    token_ids: list[int]
    kv_handoff: KVHandoff | None
    usage: TransferUsage | None


class StaleReferenceWorker:
    """An engine around a ``HashModel``, with a connector. Make it in the event loop in which it is used."""

    def __init__(self, worker: SuiteWorker, connector: Connector) -> None:
        self.connector = connector
        self.memory = MemoryPool(NUM_BLOCKS, worker.layout, worker.incarnation)
        model = HashModel(NUM_BLOCKS, BLOCK_SIZE, connector.worker, region=self.memory.region)
        hasher = BlockHasher(worker.model_fingerprint)
        self.manager = KVCacheManager(
            hash_model_kv_config(NUM_BLOCKS, BLOCK_SIZE),
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=hasher.hash_block_size,
            seals=model.seals,
        )
        clock = SystemClock()
        scheduler = Scheduler(SchedulerSection(), self.manager, NUM_BLOCKS * BLOCK_SIZE, connector.scheduler, clock)
        self.engine = EngineCore(scheduler, model, hasher, DEFAULT_VOCAB_SIZE)
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()
        connector.worker.set_wakeup(lambda: call_if_open(loop, self._wake.set))
        self._outputs: list[EngineCoreOutput] = []
        self._num_requests = 0

    async def prefill(self, prompt: tuple[int, ...]) -> KVHandoff:
        """Compute a prompt for a reader and return the place of its KV."""
        answer = await self._run(prompt, SamplingParams(max_tokens=1), needs_handoff=True)
        assert answer.token_ids == expected_tokens(prompt, 1)
        assert answer.kv_handoff is not None
        return answer.kv_handoff

    async def decode(self, prompt: tuple[int, ...], handoff: KVHandoff) -> Answer:
        """Continue a prompt after its first token."""
        first_token = expected_tokens(prompt, 1)
        sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS)
        return await self._run(prompt, sampling, output_token_ids=first_token, kv_handoff=handoff)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Step until the condition holds.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._wake.clear()
                self.engine.wake()
                self._outputs += self.engine.step()
                if not condition() and not self.engine.has_work():
                    await self._wake.wait()

    def forget_prefixes(self) -> None:
        """Make sure that the next prompt has no local hit."""
        assert self.manager.reset_prefix_cache(), "blocks are in use"

    async def close(self) -> None:
        """Stop everything."""
        self.engine.shutdown()
        await self.connector.stop()
        self.memory.close()

    async def _run(self, prompt: tuple[int, ...], sampling: SamplingParams, **more: object) -> Answer:
        self._num_requests += 1
        name = f"request {self._num_requests}"
        fields: dict[str, object] = {"request_id": name, "prompt_token_ids": prompt, "sampling": sampling, **more}
        self.engine.add_request(NewRequest(**fields))  # type: ignore[arg-type]  # keywords of its own
        await self.until(lambda: any(output.request_id == name and output.finish_reason for output in self._outputs))
        mine = [output for output in self._outputs if output.request_id == name]
        assert not [output.error for output in mine if output.error is not None]
        return Answer(
            [token_id for output in mine for token_id in output.new_token_ids],
            next((output.kv_handoff for output in mine if output.kv_handoff is not None), None),
            next((output.transfer_usage for output in mine if output.transfer_usage is not None), None),
        )


@dataclass(frozen=True, slots=True)
class StaleReferenceCluster:
    """A decode worker, a prefill worker, and a second incarnation of the latter at another address."""

    owner: StaleReferenceWorker
    next_life: StaleReferenceWorker
    reader: StaleReferenceWorker

    async def assert_refused(self, prompt: tuple[int, ...], handoff: KVHandoff, reasons: set[str] | None = None) -> None:
        """Check that a request with this reference emits the right tokens, and reports that it computed its prompt."""
        answer = await self.reader.decode(prompt, handoff)
        assert answer.token_ids == expected_tokens(prompt, NUM_OUTPUT_TOKENS)[1:], "the reference has changed the output"
        assert answer.usage is not None, "nothing is said about the handoff"
        assert answer.usage.verified_blocks == 0
        assert answer.usage.fallback_reason in (reasons or REFUSALS)
        assert answer.usage.recomputed_tokens == len(prompt)
        await self.reader.until(lambda: not self.reader.engine.has_requests())
        assert self.reader.manager.usage == 0.0, "blocks are left"

    async def reuse(self, handoff: KVHandoff) -> None:
        """Release a handoff and compute other prompts on its owner, until none of its blocks has its old content."""
        await self.end_handoff(handoff)
        blocks = self.owner.manager.block_pool.blocks
        (group,) = handoff.groups
        number = 0
        while any(blocks[b].generation == g for b, g in zip(group.block_ids, group.generations, strict=True)):
            number += 1
            other = await self.owner.prefill(tuple(range(1000 * number, 1000 * number + len(PROMPT))))
            await self.end_handoff(other)

    async def end_handoff(self, handoff: KVHandoff) -> None:
        """End a handoff as a reader does after its last use, and wait until its owner has freed the blocks."""
        await self.reader.decode(tuple(range(9000, 9016)), handoff)  # refused at once: it is not this prompt's
        await self.reader.until(lambda: not self.reader.engine.has_requests())
        await self.owner.until(lambda: self.owner.manager.usage == 0.0)
        self.reader.forget_prefixes()


@pytest.mark.asyncio
class StaleReferenceSuite:
    """The five cases, and a control: a reference that is right is used."""

    @abstractmethod
    def make_connector(self, worker: SuiteWorker) -> Connector:
        """Return a new connector that is not started."""

    @pytest_asyncio.fixture
    async def cluster(self) -> AsyncIterator[StaleReferenceCluster]:
        """Return a running cluster; stop it in the end, in any state."""
        workers: list[StaleReferenceWorker] = []
        roles: tuple[Role, ...] = ("prefill", "prefill", "decode")
        try:
            for incarnation, role in enumerate(roles, start=1):
                worker = SuiteWorker(role, incarnation, FINGERPRINT, LAYOUT)
                workers.append(StaleReferenceWorker(worker, self.make_connector(worker)))
                await workers[-1].connector.start()
            yield StaleReferenceCluster(*workers)
        finally:
            for worker_ in reversed(workers):
                await worker_.close()

    async def test_a_right_reference_is_used(self, cluster: StaleReferenceCluster) -> None:
        answer = await cluster.reader.decode(PROMPT, await cluster.owner.prefill(PROMPT))
        assert answer.token_ids == expected_tokens(PROMPT, NUM_OUTPUT_TOKENS)[1:]
        assert answer.usage is not None
        assert (answer.usage.transferred_tokens, answer.usage.verified_blocks) == (len(PROMPT), 4)
        assert (answer.usage.recomputed_tokens, answer.usage.fallback_reason) == (0, "")

    # ---- 1: used up

    async def test_consumed_reference(self, cluster: StaleReferenceCluster) -> None:
        handoff = await cluster.owner.prefill(PROMPT)
        await cluster.reader.decode(PROMPT, handoff)
        await cluster.owner.until(lambda: cluster.owner.manager.usage == 0.0)
        cluster.reader.forget_prefixes()
        await cluster.assert_refused(PROMPT, handoff)

    # ---- 2: out of range

    @pytest.mark.parametrize("block_id", [NUM_BLOCKS, 2 * NUM_BLOCKS - 1, 2**31 - 1, 0])
    async def test_out_of_range_reference(self, cluster: StaleReferenceCluster, block_id: int) -> None:
        """One block is not the owner's: after its pool, among the landing rows of its seals, far away, or the null block."""
        handoff = await cluster.owner.prefill(PROMPT)
        ids = handoff.groups[0].block_ids
        await cluster.assert_refused(PROMPT, _with_group(handoff, block_ids=(ids[0], block_id, *ids[2:])))

    # ---- 3: reused

    async def test_reference_after_reuse(self, cluster: StaleReferenceCluster) -> None:
        handoff = await cluster.owner.prefill(PROMPT)
        await cluster.reuse(handoff)
        await cluster.assert_refused(PROMPT, handoff)

    async def test_reference_after_reuse_under_a_lease_that_is_good(self, cluster: StaleReferenceCluster) -> None:
        handoff = await cluster.owner.prefill(PROMPT)
        await cluster.reuse(handoff)
        good = await cluster.owner.prefill(OTHER_PROMPT)
        forged = msgspec.structs.replace(handoff, transfer_id=good.transfer_id)
        await cluster.assert_refused(PROMPT, forged, {fallback_reason("stale")})

    async def test_reference_after_reuse_that_names_the_new_generations(self, cluster: StaleReferenceCluster) -> None:
        """The answer to the previous prompt: everything matches except the prompt of the blocks."""
        handoff = await cluster.owner.prefill(PROMPT)
        await cluster.reuse(handoff)
        good = await cluster.owner.prefill(OTHER_PROMPT)
        forged = _with_group(good, block_hashes=handoff.groups[0].block_hashes)
        await cluster.assert_refused(PROMPT, forged, {fallback_reason("stale")})

    # ---- 4: another incarnation

    async def test_reference_of_another_incarnation(self, cluster: StaleReferenceCluster) -> None:
        """The owner has restarted: a process at its address holds another prompt in the same blocks."""
        handoff = await cluster.owner.prefill(PROMPT)
        there = await cluster.next_life.prefill(OTHER_PROMPT)
        assert there.groups[0].block_ids == handoff.groups[0].block_ids
        moved = msgspec.structs.replace(handoff, control_address=there.control_address)
        await cluster.assert_refused(PROMPT, moved, {fallback_reason("stale")})

    async def test_reference_of_another_incarnation_under_a_lease_that_is_good(self, cluster: StaleReferenceCluster) -> None:
        """As above, but the reference claims the present incarnation, and names a handoff that this one holds."""
        handoff = await cluster.owner.prefill(PROMPT)
        there = await cluster.next_life.prefill(OTHER_PROMPT)
        assert there.groups[0].generations == handoff.groups[0].generations
        forged = msgspec.structs.replace(there, groups=handoff.groups)
        await cluster.assert_refused(PROMPT, forged, {fallback_reason("stale")})

    # ---- 5: another prompt

    async def test_reference_with_another_prompts_hashes(self, cluster: StaleReferenceCluster) -> None:
        await cluster.assert_refused(PROMPT, await cluster.owner.prefill(OTHER_PROMPT), {fallback_reason("stale")})

    @pytest.mark.parametrize("position", [0, 2, 3])
    async def test_reference_with_one_block_of_another_prompt(self, cluster: StaleReferenceCluster, position: int) -> None:
        """The first blocks are right; those that are verified may be kept, blocks after the wrong one may not."""
        mine, other = await cluster.owner.prefill(PROMPT), await cluster.owner.prefill(OTHER_PROMPT)
        ids, generations = list(mine.groups[0].block_ids), list(mine.groups[0].generations)
        ids[position] = other.groups[0].block_ids[position]
        generations[position] = other.groups[0].generations[position]
        forged = _with_group(mine, block_ids=tuple(ids), generations=tuple(generations))
        answer = await cluster.reader.decode(PROMPT, forged)
        assert answer.token_ids == expected_tokens(PROMPT, NUM_OUTPUT_TOKENS)[1:], "the reference has changed the output"
        assert answer.usage is not None
        assert answer.usage.verified_blocks == 3
        assert answer.usage.fallback_reason == fallback_reason("stale")
        assert answer.usage.recomputed_tokens == len(PROMPT) - position * BLOCK_SIZE


def _with_group(handoff: KVHandoff, **changed: object) -> KVHandoff:
    (group,) = handoff.groups
    return msgspec.structs.replace(handoff, groups=(msgspec.structs.replace(group, **changed),))
