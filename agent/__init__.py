"""The agent beside a vLLM server: a worker of the cluster whose engine is that server."""
