"""Shared parts of store tests: sealed blocks, and a suite that every kind of store passes."""
