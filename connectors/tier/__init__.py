"""The common part of the connectors "offload" and "store": saves blocks to a ``kvstore.base.BlockStore`` and loads them.

They differ in the store: ``connectors.offload`` has its own store in the worker's host memory, ``connectors.store`` uses one
that workers share.
"""
