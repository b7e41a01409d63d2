"""Which blocks the workers hold, from their own reports."""
