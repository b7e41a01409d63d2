"""Predicts when a worker would finish a prompt, and chooses the worker by it. Pure computation, without I/O and clock."""
