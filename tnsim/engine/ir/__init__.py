"""The intermediate representation of the compiler, as plain data.

The modules in their reading order:

    dtypes       names of precisions
    problem      folded contractions by name
    program      operations over numbered values
    stages       runs of programs
    matmul_form  contractions as matrix products
    plan_json    plans as text
"""
