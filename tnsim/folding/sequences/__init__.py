"""Models of sequences become one Problem."""
