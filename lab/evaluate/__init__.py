"""Accuracy of methods on tasks, published benchmarks and texts, and reports of it."""
