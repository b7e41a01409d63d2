"""Prints what the plug-in uses of vLLM: a line per function, field and status. Runs in vLLM's environment."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
_CLASSES = {  # whose public methods are called, or overridden
    f"{_CONNECTORS}.v1.base": ("KVConnectorBase_V1", "SupportsHMA"),
    f"{_CONNECTORS}.v1.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
    f"{_CONNECTORS}.factory": ("KVConnectorFactory",),
    "vllm.v1.core.block_pool": ("BlockPool",),
}
_USED = {"KVConnectorFactory": {"register_connector"}, "BlockPool": {"touch", "free_blocks", "get_num_free_blocks"}}
_RECORDS = {  # whose fields are read
    f"{_CONNECTORS}.v1.base": ("KVConnectorTransferResults",),
    "vllm.config.kv_transfer": ("KVTransferConfig",),
    "vllm.v1.core.sched.output": ("SchedulerOutput",),
    "vllm.v1.outputs": ("KVConnectorOutput",),
    "vllm.v1.kv_cache_interface": (
        "KVCacheConfig",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "MLAAttentionSpec",
        "SlidingWindowMLASpec",
    ),
}
_FUNCTIONS = {
    f"{_CONNECTORS}.utils": ("get_current_attn_backends",),
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group",),
    "vllm.distributed.parallel_state": ("get_tensor_model_parallel_rank",),
    "vllm.utils.network_utils": ("get_ip",),
    "vllm.v1.attention.backends.cpu_attn": ("_get_attn_isa",),
    "vllm.v1.request": ("Request",),
}
_ENUMS = {"vllm.v1.request": ("RequestStatus",), "vllm.v1.kv_cache_layout": ("KVCacheLayout",)}


def lines() -> Iterator[str]:
    """Yield what there is, a line each."""
    for name, found in _each(_CLASSES):
        for method, value in inspect.getmembers(found, lambda value: inspect.isroutine(value) or isinstance(value, property)):
            if (method != "__init__" and method.startswith("_")) or method not in _USED.get(name, {method}):
                continue
            kind = "abstract " if getattr(value, "__isabstractmethod__", False) else ""
            yield f"{kind}{name}.{method}{'' if isinstance(value, property) else _signature(value)}"
    for name, found in _each(_RECORDS):
        for field in dataclasses.fields(found):
            yield f"{name}.{field.name}: {field.type}"
    for name, found in _each(_FUNCTIONS):
        yield f"{name}{_signature(found)}"
    for name, found in _each(_ENUMS):
        yield from (f"{name}.{member.name}" for member in found)


def _each(names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, type]]:
    for module, wanted in names.items():
        for name in wanted:
            yield name, getattr(importlib.import_module(module), name)


def _signature(function: object) -> str:
    parameters = inspect.signature(function).parameters.values()
    return "(" + ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters) + ")"


if __name__ == "__main__":
    print("\n".join(sorted(set(lines()))))
