"""A load generator for any OpenAI-compatible server, so that peers are measured with the same tool."""
