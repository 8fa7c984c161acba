"""The ground of everything else: types, options, limits, and readers of outside data."""
