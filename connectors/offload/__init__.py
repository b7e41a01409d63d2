"""A worker's own host memory as a tier behind its KV pool: more prefixes are hits than the pool holds."""
