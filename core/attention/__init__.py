"""Attention over the paged, block-major KV pool."""
