"""The end of a handoff that owns the blocks: leases and handshakes."""
