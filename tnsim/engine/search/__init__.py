"""The search for the cheapest program of a stage.

Reading order: `paths` (contraction paths from cotengra), `canonical` (equal sub-networks),
`sharing` (each distinct value once), `routes` (a route for every product), `stages` (the program).
"""
