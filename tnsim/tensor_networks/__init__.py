"""The same inner products as quimb networks, to look at and to contract by other means.

In: models, and a metric for closed networks.
Out: tagged `quimb.tensor.TensorNetwork` objects, with weights where several add up.
"""
