"""Other engines on this machine's CPU, measured beside our own."""
