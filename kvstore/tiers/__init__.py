"""Tiers below the arena: slower, larger, and persistent across restarts."""
