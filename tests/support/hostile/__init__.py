"""Hostile input for every reader of outside data, and the program that tries it."""
