"""The compiled loops: the only importers of numba."""
