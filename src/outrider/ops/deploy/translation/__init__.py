"""Old forms of launching engines, and today's: commands, Python calls and manifests."""
