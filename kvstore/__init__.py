"""A content-addressed store of sealed KV blocks: host memory, disk and Redis, in a worker's process or as a server."""
