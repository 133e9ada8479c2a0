"""The contract of methods, as a function that anyone can run on a method of his own."""

from kvthaw.testing.contract import Contract, check_method

__all__ = ["Contract", "check_method"]
