"""Kernels, one operation per file, as in `kvthaw.kernels`."""
