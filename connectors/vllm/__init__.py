"""kvferry as a KV connector of vLLM: the p2p agent behind vLLM's connector interface."""
