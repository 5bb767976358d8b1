"""The version of the package, in one place without imports."""

__version__ = "0.2.0"
