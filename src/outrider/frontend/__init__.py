"""Between users and the engine: requests in, outputs back."""
