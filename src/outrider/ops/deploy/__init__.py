"""Other engines, and our server in production: commands, configs and manifests from one spec.

Engines, traps, schemas and templates are data files below ``data``; nothing here imports torch.
"""
