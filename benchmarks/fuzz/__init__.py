"""Random and hostile traffic for a real server."""
