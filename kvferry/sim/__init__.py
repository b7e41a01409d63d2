"""The deterministic simulation: real schedulers, pools, leases, seals, transfers and routers under one virtual clock."""
