"""Fetches and checks the images of requests, within limits."""
