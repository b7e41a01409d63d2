"""Sending work to workers: membership, placement, attempts and retries."""
