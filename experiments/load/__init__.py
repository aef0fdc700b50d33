"""Open-loop load on a server."""
