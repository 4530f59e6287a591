"""The intermediate representation of the compiler, as plain data.

Reading order: `dtypes`, `problem` (folded contractions by name), `program` (a single stage over
numbered values), `stages` (runs of programs), `matmul_form` (contractions as matrix products),
`steps` (a program as calls of NumPy), `plan_json` (plans as text).
"""
