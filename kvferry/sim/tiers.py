"""The tiers of a simulated cluster: gives each worker its own, and owns the lives of the store that they share.

Called by ``kvferry.sim.cluster``, which decides when something befalls it.
"""

from __future__ import annotations

from random import Random

from core.ids import SeededIds
from core.testing.sim_loop import Process, ProcessClock
from core.wire.kv import KVLayoutInfo
from kvferry.sim.host import Host, World
from kvferry.sim.store import HEARTBEAT_INTERVAL_S, REQUEST_TIMEOUT_S, SimEmbeddedStore, SimStoreClient, SimStoreServer
from kvferry.sim.tier import SimTier
from kvferry.sim.tier_plan import STORE, TierPlan
from kvstore.arena import Arena
from kvstore.client_machine import ClientOptions
from kvstore.testing.sim_store import DictTier


class SimTiers:
    """All tiers of one run."""

    def __init__(self, world: World, plan: TierPlan) -> None:
        self.plan = plan
        self.num_flipped_bits = 0
        self._world = world
        self._lower = [DictTier(must_be_asked=index > 0) for index in range(plan.num_lower_tiers)]
        self._processes: dict[str, Process] = {}  # by client id
        self._num_lives = 0
        self._server: SimStoreServer | None = None

    @property
    def process(self) -> Process:
        """That of the shared store, in its present life."""
        assert self._server is not None
        return self._server.host.process

    def start(self) -> None:
        """Begin a life of the shared store, if there is one."""
        if self.plan.name == "store":
            self._num_lives += 1
            seed = Random(f"{self.plan.seed}/{STORE}/{self._num_lives}").getrandbits(63)
            process = Process(self._world.loop, STORE, ProcessClock(self._world.loop, 9000.0))
            self._server = SimStoreServer(Host(self._world, process), self.plan, seed, self._lower, self._processes)

    def crash(self, seconds: float) -> None:
        """End the life of the shared store; the next one begins later, with what lies on its disk."""
        if self.process.is_alive:
            self.process.kill()
            self._world.loop.call_later(seconds, self.start)

    def calm_down(self) -> None:
        """Lose no replies any more."""
        if self._server is not None:
            self._server.calm_down()

    def corrupt(self, tier: SimTier | None) -> None:
        """Change a bit of a block that is stored: in a worker's own tier, or in the shared store."""
        owner = tier if tier is not None else self._server
        if owner is not None:
            self.num_flipped_bits += owner.corrupt()

    def open(self, host: Host, layout: KVLayoutInfo, seed: int) -> SimTier:
        """Return the tier of a worker that starts."""
        ids = SeededIds(Random(f"{seed}/tier").getrandbits(63))
        plan, name = self.plan, host.process.name
        if plan.name == "offload":
            return SimTier(host, plan, layout, SimEmbeddedStore(host, plan, layout.block_bytes, ids))
        client_id = f"{name}-{ids.bits(64):x}"
        self._processes[client_id] = host.process
        process = None if name in plan.remote_workers else (1, 0)
        options = ClientOptions(client_id, layout.block_bytes, REQUEST_TIMEOUT_S, HEARTBEAT_INTERVAL_S, process)
        return SimTier(host, plan, layout, SimStoreClient(host, options, ids, self._arena))

    def leftovers(self) -> list[str]:
        """Return what the shared store holds for nobody."""
        return self._server.leftovers() if self._server is not None else []

    def _arena(self, incarnation: int) -> Arena | None:
        """Return the memory of the life that a client has been welcomed by, None if it is over."""
        machine = self._server.machine if self._server is not None else None
        if machine is None or machine.incarnation != incarnation or machine.memory is None:
            return None
        return machine.memory.arena
