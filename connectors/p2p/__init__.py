"""Handoff of KV blocks from a prefill to a decode worker: the decode worker reads (pulls) them from the prefill worker."""
