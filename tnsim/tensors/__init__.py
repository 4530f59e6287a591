"""One layer as named arrays: lifted, positional, flattened, tabulated."""
