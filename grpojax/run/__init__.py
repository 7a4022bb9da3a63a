"""A recipe, and the loop that trains by it. `trainer` is the place to start reading."""
