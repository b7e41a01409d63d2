"""Block pool, prefix cache and KV cache manager. Torch-free."""
