"""Public names and their modules: read by type checkers, and by `__init__.py` at run time."""

from .contraction import Expression as Expression
from .contraction import contract as contract
from .contraction import contract_expression as contract_expression
from .quimb_networks import network as network
from .quimb_networks import networks as networks
