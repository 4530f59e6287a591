"""The metric classes, their input moments, and how legs are joined."""
