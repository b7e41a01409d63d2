"""Conformance suites for connectors and transports, shipped for those who write one."""
