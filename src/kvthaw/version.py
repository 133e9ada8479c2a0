"""The version of kvthaw."""

__version__ = "0.1.0"
