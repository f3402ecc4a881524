"""Cores, NUMA domains, affinity and memory of this machine."""
