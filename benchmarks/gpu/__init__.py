"""What is promised of a GPU, checked on one: noise, kernel, torch path, bandwidth, the rule."""
