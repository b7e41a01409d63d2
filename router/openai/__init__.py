"""The vocabulary of the OpenAI API: bodies in, token ids through, bodies out."""
