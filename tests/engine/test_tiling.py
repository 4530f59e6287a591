"""Large values in blocks: the same numbers in less memory, and nothing is computed twice."""

import dataclasses
import json

import jax
import pytest
from closeness import assert_close
from seeds import generator

from tnsim.engine import tiling
from tnsim.engine.execution import precision
from tnsim.engine.lowering import run_piece
from tnsim.engine.piece import Operation, Piece
from tnsim.engine.plan_json import piece_from_data
from tnsim.engine.tiling import tiled


def contract(args, labels, output):
    return Operation("contract", args, labels, output)


SHAPES = ((6, 2), (4, 4, 2), (4, 4), (6,))
CHAIN = (
    contract((0, 1), ((0, 1), (2, 3, 1)), (0, 2, 3)),  # y[u, a, b] = x[u, k] t[a, b, k]
    contract((4, 4), ((0, 1, 2), (0, 2, 1)), (0, 1, 2)),  # z[u, a, b] = y[u, a, b] y[u, b, a]
    contract((5, 2), ((0, 1, 2), (1, 3)), (2, 0, 3)),  # s[b, u, c] = z[u, a, b] w[a, c]
    contract((6, 3), ((0, 1, 2), (1,)), (2, 0)),  # r[c, b] = s[b, u, c] v[u]
)
READ = contract((7, 2), ((0, 1), (0, 1)), (0,))
PIECE = Piece(SHAPES, (*CHAIN, READ), (8,))


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Values of 96 elements are large, and a block is of two values of their index."""
    monkeypatch.setattr(tiling, "WHOLE", 90)
    monkeypatch.setattr(tiling, "BLOCK", 40)


def outputs(piece, run=run_piece):
    rng = generator(0)
    return run(piece, [rng.normal(size=shape) for shape in piece.shapes])[0]


def data_of(piece):
    """As a plan's document has it."""
    return json.loads(json.dumps(dataclasses.asdict(piece)))


def test_a_chain_of_large_values_is_a_loop_over_blocks():
    found = tiled(PIECE)
    loop, read = found.operations
    assert (loop.kind, loop.block, read.kind) == ("loop", 2, "contract")
    assert found.multiplications == PIECE.multiplications
    assert found.peak_elements < PIECE.peak_elements
    assert_close(outputs(found), outputs(PIECE), rtol=1e-12)
    assert piece_from_data(data_of(found)) == found


def test_blocks_compiled():
    def compiled(piece, arrays):
        return jax.jit(lambda arrays: run_piece(piece, arrays))(arrays)

    with precision():
        assert_close(outputs(tiled(PIECE), compiled), outputs(PIECE), rtol=1e-12)


def test_a_block_divides_the_index():
    data = data_of(tiled(PIECE))
    data["operations"][0][-1] = 4
    with pytest.raises(ValueError, match="blocks has one label, whose size they divide"):
        piece_from_data(data)


ELSEWHERE = contract((5,), ((0, 1, 2),), (1, 2))
WHOLE_PIECES = {
    "an output": dataclasses.replace(PIECE, outputs=(8, 5)),
    "read by two sums": Piece(SHAPES, (*CHAIN, ELSEWHERE), (7, 8)),
    "small": Piece(((5, 2), *SHAPES[1:3], (5,)), (*CHAIN, READ), (8,)),
}


@pytest.mark.parametrize("name", WHOLE_PIECES)
def test_what_stays_whole(name):
    piece = WHOLE_PIECES[name]
    assert tiled(piece) == piece
