"""The guard's drill: a real fleet, faults, and what the guard does about them."""
