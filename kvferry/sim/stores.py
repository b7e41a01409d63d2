"""The stores of a simulated cluster: their incarnations, and each worker's access to them.

``kvferry.sim.cluster`` decides which faults they suffer, and when. A store keeps KV blocks (a tier below the workers'
pools), embeddings, or both.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from core.ids import SeededIds
from core.wire.kv import KVLayoutInfo
from kvferry.sim.faults import Fault
from kvferry.sim.host import Host, World
from kvferry.sim.loop import Process, ProcessClock
from kvferry.sim.lower_tier import SimLowerTier
from kvferry.sim.store import (
    HEARTBEAT_INTERVAL_S,
    REQUEST_TIMEOUT_S,
    SimEmbeddedStore,
    SimStoreClient,
    SimStoreServer,
    store_address,
)
from kvferry.sim.tier import SimTier
from kvferry.sim.tier_plan import TierPlan
from kvferry.sim.troubles import Kind
from kvstore.arena import Arena
from kvstore.client_actions import ClientOptions


class SharedStore:
    """A store that workers share, in all its incarnations. The content of its disk outlives each of them."""

    def __init__(self, world: World, plan: TierPlan) -> None:
        self._world = world
        self._plan = plan
        self.lower = [self._make_lower_tier(index) for index in range(plan.num_lower_tiers)]
        self._processes: dict[str, Process] = {}  # by client id
        self._num_starts = 0
        self._server: SimStoreServer | None = None

    @property
    def process(self) -> Process:
        """The process of its present incarnation."""
        assert self._server is not None
        return self._server.host.process

    def start(self) -> None:
        """Start an incarnation."""
        self._num_starts += 1
        name = self._plan.process
        seed = Random(f"{self._plan.seed}/{name}/{self._num_starts}").getrandbits(63)
        process = Process(self._world.loop, name, ProcessClock(self._world.loop, 9000.0))
        self._server = SimStoreServer(Host(self._world, process), self._plan, seed, self.lower, self._processes)

    def crash(self, seconds: float) -> None:
        """End an incarnation; the next one starts later, with the content of its disk."""
        if self.process.is_alive:
            self.process.kill()
            self._world.loop.call_later(seconds, self.start)

    def calm_down(self) -> None:
        """Stop losing replies."""
        if self._server is not None:
            self._server.calm_down()

    def corrupt(self) -> bool:
        """Change a bit of a stored block; False if there is none."""
        return self._server is not None and self._server.corrupt()

    def connect(self, host: Host, block_bytes: int, ids: SeededIds, purpose: str = "") -> SimStoreClient:
        """Return a worker's client for blocks of a size."""
        name, plan = host.process.name, self._plan
        client_id = f"{name}{purpose}-{ids.bits(64):x}"
        self._processes[client_id] = host.process
        process = None if name in plan.remote_workers else (1, 0)
        options = ClientOptions(client_id, block_bytes, REQUEST_TIMEOUT_S, HEARTBEAT_INTERVAL_S, process)
        return SimStoreClient(host, store_address(plan.process), options, ids, self._arena)

    def leftovers(self) -> list[str]:
        """Return resources that are held without an owner."""
        return self._server.leftovers() if self._server is not None else []

    def _make_lower_tier(self, index: int) -> SimLowerTier:
        """Return a tier like a disk, or one that must be asked. A missing block counts as trouble of its store."""

        def on_lost_read() -> None:
            self._world.network.troubles.note(Kind.STORE, [self._plan.process], 0.0)

        loop = self._world.loop
        return SimLowerTier(lambda: loop.now, on_lost_read, must_be_asked=index > 0)

    def _arena(self, incarnation: int) -> Arena | None:
        """Return the memory of the incarnation that has welcomed a client, None if it is over."""
        machine = self._server.machine if self._server is not None else None
        if machine is None or machine.incarnation != incarnation or machine.memory is None:
            return None
        return machine.memory.arena


class SimStores:
    """All stores of one run. ``tier`` is the tier below the pools, ``embeddings`` a store of embeddings alone."""

    def __init__(self, world: World, tier: TierPlan | None, embeddings: TierPlan | None) -> None:
        shared = [plan for plan in (tier, embeddings) if plan is not None and plan.name == "store"]
        self.shared = {plan.process: SharedStore(world, plan) for plan in shared}
        self.num_flipped_bits = 0
        self._tier = tier

    def start(self) -> None:
        """Start the first incarnation of each."""
        for store in self.shared.values():
            store.start()

    def calm_down(self) -> None:
        """Stop losing replies."""
        for store in self.shared.values():
            store.calm_down()

    def corrupt(self, owner: SharedStore | SimTier) -> None:
        """Change a bit of a stored block: in a worker's own tier, or in a store that workers share."""
        self.num_flipped_bits += owner.corrupt()

    def fail_tier(self, name: str, index: int, kind: Fault, seconds: float) -> None:
        """Let a lower tier of a store that workers share fail for a while."""
        self.shared[name].lower[index].fail(kind, seconds)

    def count_what_happened(self) -> Counter[str]:
        """Count events that not every run has."""
        happened = Counter(flipped_bits=self.num_flipped_bits)
        for store in self.shared.values():
            for tier in store.lower:
                happened.update(tier.counts)
        return happened

    def open_tier(self, host: Host, layout: KVLayoutInfo, seed: int) -> SimTier | None:
        """Return the tier of a worker, if workers have one."""
        plan = self._tier
        if plan is None:
            return None
        ids = SeededIds(Random(f"{seed}/tier").getrandbits(63))
        if plan.name == "offload":
            return SimTier(host, plan, layout, SimEmbeddedStore(host, plan, layout.block_bytes, ids))
        return SimTier(host, plan, layout, self.shared[plan.process].connect(host, layout.block_bytes, ids))

    def of_embeddings(self) -> SharedStore:
        """Return the store in which workers keep embeddings: one of its own, or that of KV blocks."""
        return list(self.shared.values())[-1]

    def leftovers(self) -> list[str]:
        """Return resources that the shared stores hold without an owner."""
        return [leftover for store in self.shared.values() for leftover in store.leftovers()]
