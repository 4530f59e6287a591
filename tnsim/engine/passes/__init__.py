"""Rewrites of programs and plans that leave their results unchanged.

The modules in their reading order:

    layout     the order of axes
    tiling     large values in blocks
    hoisting   plans of pairs cut into shares
"""
