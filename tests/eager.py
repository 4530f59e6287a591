"""The meaning of programs and plans, operation by operation: `einsum` and sums, on NumPy or PyTorch.

The oracle of what NumPy runs and XLA compiles. It shares no code with them but the division by scales.
"""

import itertools

import numpy as np
from autoray import do

from tnsim.engine.runtime.execution import Result
from tnsim.scaled import scale_exponent, shifted


def run_program(program, inputs):
    """All outputs of a program, divided by their scales, and the exponent of each scale."""
    values = list(inputs)
    for op in program.operations:
        values.append(_value(op, [values[a] for a in op.args]))
    outputs = [values[n] for n in program.outputs]
    exponents = [scale_exponent(outputs[which], power) for which, power in program.scales]
    for n, powers in enumerate(program.powers):
        for slot, power in powers:
            outputs[n] = shifted(outputs[n], -power * exponents[slot])
    return outputs, exponents


def run(plan, arrays):
    """The result of a plan, stage by stage."""
    values, exponents = dict(arrays), {}
    for n, stage in enumerate(plan.stages):
        inputs = [values[name] for name in stage.inputs]
        outputs, scales = run_program(plan.programs[stage.program], inputs)
        values.update(zip(stage.outputs, outputs, strict=True))
        exponents.update(zip([(n, group) for group in stage.groups], scales, strict=True))
    return Result({name: values[name] for name in plan.outputs}, exponents, plan.scale_weights)


def _value(op, args):
    if op.kind == "sum":
        terms = zip(op.weights, args, op.labels, strict=True)
        return sum(weight * _einsum([x], [labels], op.output) for weight, x, labels in terms)
    if op.kind == "loop":
        return sum(_turn(op, args, number) for number in itertools.product(*_ranges(op, args)))
    return _einsum(args, op.labels, op.output)


def _ranges(loop, args):
    sizes = {}
    for x, labels in zip(args, loop.labels, strict=True):
        sizes |= dict(zip(labels, x.shape, strict=True))
    return [range(sizes[label] // max(loop.block_size, 1)) for label in loop.chunks]


def _turn(loop, args, number):
    """What a turn adds: the body at an entry, or a block, of every label of the loop."""
    at, block = dict(zip(loop.chunks, number, strict=True)), loop.block_size
    taken = {label: slice(n * block, (n + 1) * block) if block else n for label, n in at.items()}
    parts = [x[(*(taken.get(label, slice(None)) for label in labels), ...)]
             for x, labels in zip(args, loop.labels, strict=True)]  # fmt: skip
    (outputs, _) = run_program(loop.body, parts)
    return outputs[0]


def _einsum(args, labels, output):
    names = {}
    for label in itertools.chain(*labels):
        names.setdefault(label, chr(ord("a") + len(names)))
    terms = ["".join(names[label] for label in own) for own in (*labels, output)]
    more = {"optimize": True} if isinstance(args[0], np.ndarray) else {}
    found = do("einsum", ",".join(terms[:-1]) + "->" + terms[-1], *args, **more)
    return np.asarray(found) if isinstance(args[0], np.generic | np.ndarray) else found
