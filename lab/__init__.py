"""This project's own laboratory, which no wheel has: kernels, the papers' figures, acceptance goals.

Run its files from the repository's root, as modules; `python -m lab` lists the commands."""
