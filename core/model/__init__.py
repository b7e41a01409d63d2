"""Model files, decoder, tokenizer."""
