"""The same inner products as quimb networks."""
