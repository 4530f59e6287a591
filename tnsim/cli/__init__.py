"""The command line, which prints and writes results and computes nothing itself.

The modules in their reading order:

    app       the program, its exit status, and the commands on two files
    options   options, metrics, modules and output that several commands share
    pairwise  `tnsim pairwise`, also of a run that still trains
    localise  `tnsim paths` and `tnsim change`
    bench     planned and measured cost by depth
    commands  `tnsim bench`, `tnsim demo` and `tnsim info`
"""
