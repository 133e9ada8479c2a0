"""This project's own laboratory, which no wheel has. Run it from the repository's root: `python -m lab`."""
