"""All pairs of many models, resumable.

The modules in their reading order:

    run                            the public functions, and runs over parts
    sources, preparation           the models of a run, and what is known before its first product
    ways                           what computes the pairs of a run, its price, and its tiles
    run_routes, contracted_runs    the routes of a run: all but contractions, and contractions
    work                           what is computed, and the loop that does it
    store                          records on disk, and which process makes them
    growing                        models that are added, and the records that they need
    result                         the result, and the files that other programs read
    heads                          heads of transformers against heads, and what heads read
"""
