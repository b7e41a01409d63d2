"""Tool calls in the text of a model: their formats, and parsers that split a stream into text and calls."""
