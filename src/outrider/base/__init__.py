"""What all other packages build on: types, options, limits, and readers of outside data."""
