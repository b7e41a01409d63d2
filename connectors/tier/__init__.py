"""Saving blocks to, and loading them from, a ``kvstore.base.BlockStore``: what the connectors offload and store share.

They differ in the store: ``connectors.offload`` has one of its own in the worker's host memory, ``connectors.store`` uses one
that workers share.
"""
