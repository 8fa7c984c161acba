"""Watching engines: one schema for the metrics of all, rules that alert, a dashboard."""
