"""Rewrites of compiled programs and plans: `layout` of axes, `tiling`, `splitting`, `hoisting`."""
