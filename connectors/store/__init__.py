"""A store of KV blocks as a tier behind a worker's pool; workers that share one find each other's prefixes."""
