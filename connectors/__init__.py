"""KV connectors, by name."""
