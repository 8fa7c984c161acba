"""What everything else rests on: types, options, limits, and readers of outside data."""
