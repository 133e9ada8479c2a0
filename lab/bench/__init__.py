"""Times of models with random weights; each benchmark checks its output before it reports a time."""
