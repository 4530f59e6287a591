"""The command line, which prints and writes results and computes nothing itself.

The modules in their reading order:

    app               the program, its exit status, and the commands on two files
    options           options, metrics and output that several commands share
    user_modules      modules of PyTorch that an option names
    follow, pairwise  `tnsim pairwise`, and checkpoints of a run that still trains
    localise          `tnsim paths` and `tnsim change`
    bench, commands   `tnsim bench`, `tnsim demo` and `tnsim info`
"""
