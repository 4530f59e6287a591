"""The intermediate representation of the compiler, as plain data.

The modules in their reading order:

    problem      folded contractions by name
    program      operations over numbered values, and runs of them
    matmul_form  contractions as matrix products
    plan_json    plans as text
"""
