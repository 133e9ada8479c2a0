"""This project's own laboratory: kernels, the papers' figures, acceptance goals. Run from the repository's root, as modules."""
