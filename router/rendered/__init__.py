"""Requests that the API of an engine renders, because only the engine serves what they ask for."""
