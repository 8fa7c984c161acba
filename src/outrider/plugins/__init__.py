"""Outrider's rule inside other engines."""
