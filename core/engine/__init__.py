"""Schedule, execute, update: the engine of one worker."""
