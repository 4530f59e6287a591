"""Reads a finished matrix; computes no similarity."""
