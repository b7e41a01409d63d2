"""Structured output: from a schema, regex, choice, grammar or structural tag to the tokens that may come next. Torch-free."""
