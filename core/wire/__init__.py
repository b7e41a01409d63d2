"""Bytes between processes: msgspec messages over ZeroMQ."""
