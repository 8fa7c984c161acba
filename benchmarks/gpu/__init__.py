"""Checks of what is promised of a GPU: noise, kernel, torch path, bandwidth, the rule."""
