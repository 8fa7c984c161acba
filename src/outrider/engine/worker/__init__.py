"""The engine in a process of its own, and the messages to and from it."""
