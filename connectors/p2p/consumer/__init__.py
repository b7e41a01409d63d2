"""The reading end of a handoff: pulls, leases that are kept alive, verification."""
