"""Types, options, limits and readers of outside data, on which all other packages build."""
