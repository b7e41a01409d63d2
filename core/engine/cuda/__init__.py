"""What only runs on a CUDA device: recorded decode steps, pinned memory, block copies."""
