"""Requests and engines as the plug-in sees them, without vLLM."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from connectors.vllm.handoff_params import Rank
from connectors.vllm.identity import ModelIdentity
from connectors.vllm.producer import EngineIdentity
from core.wire.kv import KVLayoutInfo

Status = enum.Enum(
    "Status",
    [
        *("WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED"),
        *("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"),
    ],
)

MODEL = ModelIdentity(
    weights="tiny",
    revision="",
    config="c0ffee",
    dtype="float32",
    quantization="",
    speculative="",
    attention="CPU_ATTN",
    vllm="0.32",
)
LAYOUT = KVLayoutInfo(
    dtype="auto:float32", order="HNC", block_size=32, num_layers=4, num_kv_heads=2, head_dim=32, block_bytes=65536
)
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def engine(name: str = "p", **changes: Any) -> EngineIdentity:
    """Return an engine of one rank."""
    values = {
        "engine_id": name,
        "model": MODEL,
        "layout": LAYOUT,
        "ranks": (Rank("tcp://127.0.0.1:7000", 77),),
        "num_kv_heads": LAYOUT.num_kv_heads,
        "lease_ms": 30_000,
    }
    return EngineIdentity(**(values | changes))


@dataclass
class FakeRequest:
    """What the plug-in reads of ``vllm.v1.request.Request``."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    status: Status = Status.WAITING
    prompt_embeds: Any = None
    mm_features: list[Any] = field(default_factory=list)
    lora_request: Any = None
    cache_salt: str | None = None
    resumable: bool = False
    abort_immediately: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids or ())


def image(identifier: str, offset: int, length: int) -> SimpleNamespace:
    """Return a feature of a request."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))
