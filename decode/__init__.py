"""The decode role: pulls KV and streams tokens."""
