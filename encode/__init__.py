"""The encode role: embeddings of images, computed once, for whoever computes the prompts."""
