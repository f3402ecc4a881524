"""Number formats of weights and caches, and how they are packed."""
