"""Random programs of the engine, and arrays for them."""

import seeds
from hypothesis import strategies as st

from tnsim.engine.ir.program import Operation, Program

SIZES = {0: 2, 1: 3, 2: 1, 3: 4, 4: 3, 5: 2}


def drawn(shapes, dtype="float64", seed=0):
    rng = seeds.generator(seed)
    arrays = [rng.normal(size=shape) for shape in shapes]
    if dtype.startswith("complex"):
        arrays = [x + 1j * rng.normal(size=x.shape) for x in arrays]
    return [x.astype(dtype) for x in arrays]


@st.composite
def programs(draw):
    """Programs of contractions, diagonals, sums and loops, of any labels and orders of axes."""
    values = [draw(st.permutations(draw(st.lists(st.sampled_from([*SIZES]), unique=True, max_size=4))))
              for _ in range(draw(st.integers(1, 3)))]  # fmt: skip
    shapes = tuple(tuple(SIZES[x] for x in labels) for labels in values)
    operations = []
    for _ in range(draw(st.integers(1, 5))):
        a, b = (draw(st.integers(0, len(values) - 1)) for _ in range(2))
        kind = draw(st.sampled_from(["contract", "reduce", "sum", "diagonal", "loop"]))
        one, other = tuple(values[a]), tuple(values[b])
        if kind == "contract":
            both = sorted(set(one) & set(other))
            summed = draw(st.sets(st.sampled_from(both))) if both else set()
            output = tuple(draw(st.permutations(sorted({*one, *other} - summed))))
            operations.append(Operation("contract", (a, b), (one, other), output))
        elif kind == "reduce":
            output = draw(st.permutations(one))[: draw(st.integers(0, len(one)))]
            operations.append(Operation("contract", (a,), (one,), tuple(output)))
        elif kind == "sum":
            output = tuple(draw(st.permutations(one)))
            alike = [n for n, labels in enumerate(values) if set(labels) == set(one)]
            args = tuple(draw(st.lists(st.sampled_from(alike), min_size=1, max_size=5)))
            weights = draw(st.lists(st.sampled_from([1.0, -1.0, 0.5, -0.5, 3.0]), min_size=len(args),
                                    max_size=len(args)))  # fmt: skip
            labels = tuple(tuple(values[n]) for n in args)
            operations.append(Operation("sum", args, labels, output, tuple(weights)))
        elif kind == "diagonal" and {1, 4} <= set(one):  # two axes of one size
            merged = tuple(1 if label == 4 else label for label in one)
            output = tuple(dict.fromkeys(merged))
            operations.append(Operation("contract", (a,), (merged,), output))
        elif kind == "loop" and set(one) | set(other):
            every = st.sampled_from(sorted({*one, *other}))
            chunks = tuple(draw(st.lists(every, unique=True, min_size=1, max_size=2)))
            inner = [tuple(x for x in labels if x not in chunks) for labels in (one, other)]
            output = tuple(draw(st.permutations(sorted({*inner[0], *inner[1]}))))
            product = Operation("contract", (0, 1), tuple(inner), output)
            doubled = Operation("sum", (2, 2), (output, output), output, (1.0, 1.0))
            body = Program(tuple(tuple(SIZES[x] for x in labels) for labels in inner),
                           (product, doubled), (3,))  # fmt: skip
            lanes = draw(st.integers(1, 3))
            operations.append(Operation("loop", (a, b), (one, other), output, chunks=chunks, body=body,
                                        concurrency=lanes))  # fmt: skip
        else:
            continue
        values.append(output)
    count = len(values)
    outputs = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))
    return Program(shapes, tuple(operations), (*outputs, count - 1))
