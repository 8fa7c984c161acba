"""Drafter auto against fixed choices: cells, their rounds, and what follows from them."""
