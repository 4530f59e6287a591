"""All pairs of many models, resumable.

The modules in their reading order:

    run                            the public functions
    sources, preparation           the models of a run, and what is known before its first product
    ways, run_plan                 what computes the pairs of a run, its price, and its tiles
    vector_runs, kernel_runs       the routes of a run: vectors, kernels,
    forward_runs, contracted_runs  forward passes, and contractions
    batched_plans                  contractions of many pairs at once
    tasks, work                    what is computed, and the loop that does it
    normalise                      norms and cosines as a result stores them
    store, leases                  records on disk, and which process makes them
    growing                        models that are added, and the records that they need
    result                         the result, and the files that other programs read
    part_runs, heads, composition  parts of transformers, heads against heads, and what heads read
"""
