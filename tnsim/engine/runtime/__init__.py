"""How plans run on a device.

Read `lowering` first (a program in array functions), then `stacking` (a program on stacks of
arrays), `compiling` (compiled programs, from memory, disk or XLA), `devices` (devices and their
memory), `threads` (a pool, and the threads of BLAS), `binding` (a plan in NumPy, without
compiling), `execution` (a plan on arrays), `rates` (the seconds that a plan takes, and the tier in
which it runs), and at last `gradients` (a plan and its pullback).
"""
