"""A worker's own host memory as a tier below its KV pool: it caches more prefixes than the pool can hold."""
