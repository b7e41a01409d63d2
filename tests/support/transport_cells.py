"""Shared parts of tests with real clusters: the ways to carry KV blocks, and the metrics that must return to zero."""

from collections.abc import Mapping

CELLS: Mapping[str, tuple[str, Mapping[str, str]]] = {  # name → transport, environment of the processes
    "shm": ("shm", {}),
    "tcp": ("tcp", {}),
    "nixl": ("nixl", {}),
    "nixl-tcp": ("nixl", {"UCX_TLS": "tcp"}),
}
HELD = (  # gauges of an idle worker that holds nothing are all 0
    "kvferry_kv_early_blocks",
    "kvferry_kv_leaked_blocks",
    "kvferry_kv_leased_blocks",
    "kvferry_kv_loading_blocks",
    "kvferry_kv_parked_blocks",
    "kvferry_kv_quarantined_blocks",
    "kvferry_num_requests_running",
    "kvferry_num_requests_waiting",
    "kvferry_num_requests_loading",
)
