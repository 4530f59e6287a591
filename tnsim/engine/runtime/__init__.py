"""How plans run on a device.

Read `stacking` first (a program on stacks of arrays), then `binding` (a program as functions of
arrays, and a plan in NumPy), `compiling` (compiled programs, from memory, disk or XLA), `devices`
(devices and their memory), `threads` (a pool, and the threads of BLAS), `execution` (a plan on
arrays), `tiers` (where plans run, and the seconds that they take), and at last `gradients` (a plan
and the way back through it).
"""
