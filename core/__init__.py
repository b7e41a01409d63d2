"""What both roles need: wire messages, KV cache, scheduler, attention, model, engine."""
