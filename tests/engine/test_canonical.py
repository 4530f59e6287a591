"""One key for one network, whatever it is called, and without trying all orders of equal parts."""

import random

import pytest

from tnsim.engine.search.sharing import canonical


def test_equal_parts_are_not_tried_in_every_order():
    """Ten chains between two symmetric tensors: 10! orders of equal chains."""
    chains = [(3, (leg, 10 + leg)) for leg in range(10)]
    ends = [(1, tuple(range(10))), (2, tuple(range(10, 20)))]
    key, _ = canonical(ends + chains, [], lambda ref: 2 if ref == 3 else 10)
    ends = [(1, tuple(reversed(range(10)))), (2, tuple(range(10, 20)))]
    assert canonical(chains + ends, [], lambda ref: 2 if ref == 3 else 10)[0] == key


@pytest.mark.sampled(quick=10)
@pytest.mark.parametrize("seed", range(40))
def test_names_and_orders_do_not_matter(seed):
    """Labels renamed, tensors in another order, exchangeable axes exchanged."""
    g = random.Random(seed)
    tensors = []
    for _ in range(g.randint(2, 5)):
        labels = tuple(g.choice(range(7)) for _ in range(g.randint(1, 4)))
        tensors.append((10 * g.randint(1, 2) + len(labels), labels))
    exchangeable = {ref: ref % 10 if g.random() < 0.6 else 0 for ref, _ in tensors}
    used = sorted({label for _, labels in tensors for label in labels})
    is_open = [label for label in used if g.random() < 0.3]
    new = dict(zip(used, g.sample(range(50), len(used)), strict=True))
    others = []
    for ref, labels in tensors:
        renamed = [new[label] for label in labels]
        if exchangeable[ref]:
            g.shuffle(renamed)
        others.append((ref, tuple(renamed)))
    g.shuffle(others)
    key, order = canonical(tensors, is_open, exchangeable.__getitem__)
    other, _ = canonical(others, [new[label] for label in is_open], exchangeable.__getitem__)
    assert key == other and sorted(order) == is_open
