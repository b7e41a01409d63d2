"""The process around an engine: its protocol with routers, its operations port, its start and end."""
