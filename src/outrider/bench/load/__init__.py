"""A load test of any server with OpenAI's API: ``outrider bench serve``."""
