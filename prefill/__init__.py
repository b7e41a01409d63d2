"""The prefill role: computes KV and holds it under lease."""
