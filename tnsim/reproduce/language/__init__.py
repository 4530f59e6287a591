"""A language model learns n-grams, and which measure sees it.

In: text, by default the standard library's own source. Out: claims of the paper's section 3.4.
"""
