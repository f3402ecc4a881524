"""Layers that are split over ranks."""
