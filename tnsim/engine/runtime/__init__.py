"""How plans run on a device.

The modules in their reading order:

    devices    devices, their memory, a pool of threads, and the threads of BLAS
    binding    a program as functions of arrays or of stacks of them, and a plan in NumPy
    compiling  compiled programs, from memory, disk or XLA
    execution  a plan on arrays, where it runs, and the seconds that it takes
    gradients  the way back through a plan
"""
