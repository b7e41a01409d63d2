"""Conformance suites for authors of connectors and transports, shipped with the package."""
