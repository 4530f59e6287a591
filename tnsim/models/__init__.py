"""Layers and models as checked pytrees, with their forward pass."""
