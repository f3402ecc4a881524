"""Requests, the cache's ledger, scheduling, sampling and the batch loop."""
