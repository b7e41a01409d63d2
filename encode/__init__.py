"""The encode role: embeddings of images, computed once for all prefill workers."""
