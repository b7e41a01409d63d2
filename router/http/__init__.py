"""The HTTP side of the router: connections, routes, limits, streams and probes."""
