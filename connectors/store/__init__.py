"""A store of KV blocks as a tier below a worker's pool; workers that share one find each other's prefixes."""
