"""Tiers below the arena: slower, larger, and there after a restart."""
