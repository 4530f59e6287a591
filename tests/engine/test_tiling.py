"""Large values in blocks: the same numbers in less memory, and nothing is computed twice."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from closeness import assert_close
from eager import run_program
from seeds import generator

from tnsim.engine import costs
from tnsim.engine.ir.plan_json import program_from_data
from tnsim.engine.ir.program import Operation, Program
from tnsim.engine.runtime.binding import BoundStage
from tnsim.engine.runtime.execution import precision
from tnsim.engine.search import stages
from tnsim.engine.search.stages import tiled


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
PROGRAM = Program(SHAPES, (*CHAIN, READ), (8,))


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Values of 96 elements are large, and a block is of two values of their index."""
    monkeypatch.setattr(stages, "WHOLE", 90)
    monkeypatch.setattr(stages, "BLOCK", 40)


def outputs(program, run=run_program):
    rng = generator(0)
    return run(program, [rng.normal(size=shape) for shape in program.shapes])[0]


def data_of(program):
    """As a plan's document has it."""
    return json.loads(json.dumps(dataclasses.asdict(program)))


def test_a_chain_of_large_values_is_a_loop_over_blocks():
    found = tiled(PROGRAM)
    loop, read = found.operations
    assert (loop.kind, loop.block_size, read.kind) == ("loop", 2, "contract")
    assert found.multiplications == PROGRAM.multiplications
    assert costs.peak_elements(found) < costs.peak_elements(PROGRAM)
    assert_close(outputs(found), outputs(PROGRAM), rtol=1e-12)
    assert program_from_data(data_of(found)) == found


def test_blocks_compiled():
    def compiled(program, arrays):
        return jax.jit(lambda x: BoundStage.of(program, None, jnp)(x))(arrays)

    with precision():
        assert_close(outputs(tiled(PROGRAM), compiled), outputs(PROGRAM), rtol=1e-12)


def test_a_block_divides_the_index():
    data = data_of(tiled(PROGRAM))
    data["operations"][0][-1] = 4
    with pytest.raises(ValueError, match="blocks has one label, whose size they divide"):
        program_from_data(data)


ELSEWHERE = contract((5,), ((0, 1, 2),), (1, 2))
DIAGONAL = (
    contract((0,), ((0, 0, 1),), (0, 1)),  # d[i, j] = x[i, i, j]
    contract((2, 1), ((0, 1), (0, 1)), (1,)),
)
WHOLE_PROGRAMS = {
    "a block of a diagonal": Program(((8, 8, 12), (8, 12)), DIAGONAL, (3,)),
    "an output": dataclasses.replace(PROGRAM, outputs=(8, 5)),
    "read by two sums": Program(SHAPES, (*CHAIN, ELSEWHERE), (7, 8)),
    "small": Program(((5, 2), *SHAPES[1:3], (5,)), (*CHAIN, READ), (8,)),
}


@pytest.mark.parametrize("name", WHOLE_PROGRAMS)
def test_what_stays_whole(name):
    program = WHOLE_PROGRAMS[name]
    assert tiled(program) == program
