"""What one simulated run consists of: a cluster, its requests, and what goes wrong. A plan can be printed and read."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import KVFerryConfig
from core.testing.hash_encoder import input_ids_of
from core.testing.hash_model import HashAttention
from core.wire.media import MMFeature
from core.wire.messages import LoadFailurePolicy, Role
from core.wire.pairing import verifies_digests
from kvferry.sim.faults import (
    Fault,
    FaultSchedule,
)
from kvferry.sim.image_plan import ImagePlan
from kvferry.sim.slow_reading import Reading
from kvferry.sim.step_loads import StepLoadPlan
from kvferry.sim.tier_plan import TierPlan

MODEL = "hash-model"
MAX_MODEL_LEN = 128  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """One client's request, and the answer of a cluster without faults for each choice."""

    name: str
    at: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    router: str = "router-0"  # that the client is connected to
    policy: LoadFailurePolicy | None = None
    abort_at: float | None = None  # when the client leaves, unless it has its whole answer
    text_ends_after: int | None = None  # tokens after which the text of a choice ends, which only the router can detect
    expected: tuple[int, ...] = ()
    mm_features: tuple[MMFeature, ...] = ()
    media: tuple[bytes, ...] = ()
    reading: Reading | None = None  # of a slow client

    @property
    def input_ids(self) -> list[int]:
        """Return the model's input, of the prompt and of the answer."""
        return [*input_ids_of(self.prompt_token_ids, self.mm_features, self.media), *self.expected]

    def __str__(self) -> str:
        details = {
            f"{len(self.prompt_token_ids)}+{self.max_tokens} tokens": True,
            f"n={self.n}": self.n > 1,
            self.router: self.router != "router-0",
            f"policy={self.policy}": self.policy,
            f"salt={self.cache_salt}": self.cache_salt,
            "stop token": self.stop_token_ids,
            f"{len(self.mm_features)} images": self.mm_features,
            f"abort at {self.abort_at}": self.abort_at,
            f"text ends after {self.text_ends_after}": self.text_ends_after,
            str(self.reading): self.reading,
        }
        return f"{self.at:.3f} {self.name}: {', '.join(text for text, is_told in details.items() if is_told)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker. Its clock begins at any value and runs at ``clock_rate`` times the simulation's."""

    engine_id: str
    role: Role
    num_blocks: int
    block_size: int
    clock_origin: float
    clock_rate: float
    step_s: float  # of a step with tokens, up to
    host: str = "host-0"  # whose memory it can share
    kv_dtype: str = "float32"  # of its layout; workers with different ones cannot read each other
    can_switch_role: bool = False

    @property
    def control_address(self) -> str:
        """The address of the control socket for its readers."""
        return f"tcp://{self.engine_id}:7000"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """A whole run. The model has a KV cache group for each of its ``attentions``."""

    seed: int
    config: KVFerryConfig
    attentions: tuple[HashAttention, ...]
    routers: tuple[str, ...]
    workers: tuple[WorkerPlan, ...]
    requests: tuple[RequestPlan, ...]
    faults: FaultSchedule
    max_rows_per_read: int
    keeps_order: bool  # of reads, if the transport can: seals are read together with their blocks
    is_supervised: bool = False  # workers report that a supervisor restarts them
    tier: TierPlan | None = None
    images: ImagePlan | None = None
    embedding_store: TierPlan | None = None  # where embeddings have a store of their own
    step_loads: StepLoadPlan | None = None
    encoders: tuple[WorkerPlan, ...] = ()
    max_model_len: int = MAX_MODEL_LEN

    @property
    def makes_digests(self) -> bool:
        """True if the seals of the workers hold digests."""
        connector = self.config.connector
        return any(verifies_digests(connector.kv_verify, name) for name in connector.transports)

    @property
    def async_scheduling(self) -> bool:
        """True if a step stays in flight while the next one is scheduled."""
        return self.config.scheduler.async_scheduling == "on"

    @property
    def kinds(self) -> frozenset[Fault]:
        """The kinds of faults."""
        return self.faults.kinds

    def describe(self) -> list[str]:
        """Return the plan as lines of text."""
        connector, scheduler = self.config.connector, self.config.scheduler
        order = ", in order if it can" if self.keeps_order else ""
        lines = [
            f"seed {self.seed}: faults {', '.join(sorted(self.kinds)) or 'none'}",
            f"groups {', '.join(map(str, self.attentions))}",
            f"steps of {scheduler.max_num_batched_tokens} tokens and {scheduler.max_num_seqs} requests, {scheduler.policy}"
            + (", one of them in flight while the next is scheduled" if self.async_scheduling else ""),
            f"transport {', '.join(connector.transports)}{order}, verify {connector.kv_verify}, "
            f"lease {connector.lease_s:.3g} s, "
            f"{'prefixes from peers, ' if connector.peer_prefixes else ''}"
            f"transfer deadline {connector.transfer_deadline_s:.3g} s, "
            f"early pulls {'on' if connector.early_pull else 'off'}, "
            f"request timeout {self.config.router.request_timeout_s:.3g} s"
            + (", with a planner" if self.config.router.planner.enabled else ""),
        ]
        for worker in self.workers:
            blocks = f"{worker.num_blocks} blocks of {worker.block_size} tokens"
            lines.append(f"{worker.engine_id}: {blocks}, clock rate {worker.clock_rate:.3f}, on {worker.host}")
            if worker.kv_dtype != "float32":
                lines[-1] += f", layout {worker.kv_dtype}"
            lines[-1] += ", can switch its role" if worker.can_switch_role else ""
        lines += [str(part) for part in (self.tier, self.images, self.embedding_store, self.step_loads) if part is not None]
        return (
            lines
            + [str(request) for request in self.requests]
            + [str(event) for event in (*self.faults.events, *self.faults.at_chunks)]
        )


def router_address(name: str) -> str:
    """Return the address at which workers connect to a router."""
    return f"tcp://{name}:5570"
