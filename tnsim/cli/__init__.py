"""The command line; takes results and computes nothing itself.

In: words and paths.
Out: text or JSON on stdout, pictures and tables in files, one line on stderr for every error.
"""
