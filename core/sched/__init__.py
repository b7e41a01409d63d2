"""The scheduler. Torch-free."""
