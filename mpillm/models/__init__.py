"""Architectures: which layers there are and what their tensors are called."""
