"""The same inner products as quimb networks, and sums of any quimb networks through the engine.

Reading order: `network`, `closed_networks`, `network_sums`, `contraction`.
"""
