"""Rewrites of programs and plans that leave their results unchanged.

Reading order: `layout` (order of axes), `tiling` (large values in blocks), `splitting` (long
programs in parts), `hoisting` (plans of pairs cut into shares).
"""
