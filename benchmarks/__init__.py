"""Scripts that measure tnsim, and the experiments of the paper (`benchmarks.paper`)."""
