"""Every way of laying out a product gives what einsum gives, and copies are counted."""

import numpy as np
import pytest
from closeness import LARGEST, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import generator

from tnsim.engine.ir.matmul_form import MatrixProduct, copied_entries, matrix_product
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.runtime.binding import BoundStage

SIZES = {0: 2, 1: 3, 2: 2, 3: 4, 4: 3, 5: 2}


@st.composite
def contractions(draw):
    """Axes of two arguments and of their product, in any order."""
    roles = draw(st.lists(st.sampled_from(["batch", "summed", "left", "right"]), max_size=6))
    labels = list(enumerate(roles))
    first = [n for n, role in labels if role != "right"]
    second = [n for n, role in labels if role != "left"]
    output = [n for n, role in labels if role != "summed"]
    return tuple(tuple(draw(st.permutations(axes))) for axes in (first, second, output))


@settings(max_examples=200)
@given(contractions())
def test_any_order_of_axes(axes):
    first, second, output = axes
    rng = generator(0)
    arrays = [rng.normal(size=[SIZES[n] for n in labels]) for labels in (first, second)]
    operation = Operation("contract", (0, 1), (first, second), output)
    program = Program(tuple(array.shape for array in arrays), (operation,), (2,))
    (result,), _ = BoundStage.of(program, None, np)(arrays)
    wanted = np.einsum(arrays[0], list(first), arrays[1], list(second), list(output))
    assert_close(result, wanted, scale=LARGEST, rtol=3e-13)


def test_a_batch_in_the_order_of_the_result_copies_nothing():
    product, swapped = matrix_product((0, 1, 2), (0, 3, 2), (0, 1, 3), dict.fromkeys(range(4), 5))
    assert (product, swapped) == (MatrixProduct((0,), (1,), (2,), (3,)), False)
    assert (
        copied_entries(product, ((0, 1, 2), (0, 3, 2)), (0, 1, 3), dict.fromkeys(range(4), 5)) == 0
    )


def test_a_label_in_front_of_the_result_joins_the_batch():
    """x[a, u, z] y[a, s, z, w] = r[a, s, u, w]: x repeated along s; else y and r are copied."""
    sizes = {0: 3, 1: 4, 2: 5, 3: 6, 4: 7}
    first, second, output = (0, 2, 4), (0, 1, 4, 3), (0, 1, 2, 3)
    product, _ = matrix_product(first, second, output, sizes)
    assert product == MatrixProduct((0, 1), (2,), (4,), (3,))
    assert copied_entries(product, (first, second), output, sizes) == 3 * 4 * 5 * 7


@pytest.mark.parametrize("axes", [((0,), (0, 1), (0, 1)), ((0, 1), (0, 1), (0,)), ((0,), (0,), ())])
def test_no_matrices(axes):
    assert matrix_product(*axes, SIZES) is None
