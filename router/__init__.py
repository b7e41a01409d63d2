"""The OpenAI-compatible front of a cluster."""
