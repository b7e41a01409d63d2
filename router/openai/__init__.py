"""The OpenAI API: request bodies to token ids, and output tokens to response bodies."""
