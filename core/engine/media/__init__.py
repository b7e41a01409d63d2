"""Images of a step: decoding, the vision encoder, and its cache."""
