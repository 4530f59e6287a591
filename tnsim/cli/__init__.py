"""The command line, which prints and writes results and computes nothing itself.

The modules in their reading order:

    app        the program, its exit status, and the commands on two files
    options    options, metrics and output that several commands share
    follow     checkpoints of a run that still trains, for `tnsim pairwise --follow`
    pairwise   `tnsim pairwise`
    localise   `tnsim paths` and `tnsim change`
    bench      the measurements of `tnsim bench`
    commands   `tnsim bench`, `tnsim demo` and `tnsim info`
"""
