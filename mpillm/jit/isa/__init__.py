"""Vector building blocks that the kernels are made of."""
