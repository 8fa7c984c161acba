"""Training of drafters: data from the target itself, trainers, acceptance as it is served."""
