"""How plans run on a device.

The modules in their reading order:

    stacking          a program on stacks of arrays
    devices, threads  devices and their memory; a pool, and the threads of BLAS
    binding           a program as functions of arrays, and a plan in NumPy
    compiling         compiled programs, from memory, disk or XLA
    execution         a plan on arrays
    tiers             where plans run, and the seconds that they take
    gradients         the way back through a plan
"""
