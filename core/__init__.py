"""The parts that all roles share: wire messages, KV cache, scheduler, attention, model, engine."""
