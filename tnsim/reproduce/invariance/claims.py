"""What the paper's theory says, beside random networks. In: measured values. Out: claims."""

from __future__ import annotations

from tnsim.reproduce.claims import Claim, at_least, at_most, near
from tnsim.reproduce.invariance.measure import SAME_FUNCTION, Measured
from tnsim.reproduce.invariance.setting import Setting
from tnsim.reproduce.run import Run

ROUNDING = 1e-9
ERRORS = 4.0
"""Standard errors that chance exceeds once in 16,000 times."""


def claims(run: Run[Setting], measured: Measured) -> tuple[Claim, ...]:
    """Rows about symmetries, about closed forms, and about which functions are called equal.

    Args:
        run: That was measured.
        measured: Its values.

    Returns:
        The claims.
    """
    return (*_symmetries(measured), *_blindness(measured), *_exactness(measured))


def _symmetries(measured: Measured) -> list[Claim]:
    values = measured.values
    rows = []
    for copy in SAME_FUNCTION:
        rows.append(
            Claim(
                name=f"tensor-{copy}",
                text=f"Tensor similarity is 1 for a copy that is {_WORDS[copy]}.",
                where="figure 2, equation 3",
                paper=1.0,
                ours=values[f"similarity {copy}"],
                expected=near(1.0, ROUNDING),
                why="a theorem, up to rounding",
            )
        )
    return [
        *rows,
        Claim(
            name="tensor-hidden-basis",
            text="Tensor similarity is 1 for two layers in another hidden basis.",
            where="appendix A.1",
            paper=1.0,
            ours=values["similarity deep turned"],
            expected=near(1.0, ROUNDING),
            why="a theorem, up to rounding",
        ),
        Claim(
            name="tensor-negated",
            text="A negative factor is no equivalence: similarity -1.",
            where="equation 3",
            paper=-1.0,
            ours=values["similarity negated"],
            expected=near(-1.0, ROUNDING),
            why="a theorem, up to rounding",
        ),
        Claim(
            name="weights-both",
            text="Cosine of weights is lost when units are permuted, left and right swapped.",
            where="figure 2",
            ours=values["weight_cosine both"],
            expected=near(0.0, 0.2),
            why="unrelated rows: 0 on average, with the spread of this many weights",
        ),
        Claim(
            name="tensor-perturbed",
            text="Tensor similarity decays gracefully under small changes of the weights.",
            where="section 1",
            ours=values["similarity perturbed"],
            expected=at_least(0.999),
            why="noise of 1 % of the weights costs about its square",
        ),
    ]


def _blindness(measured: Measured) -> list[Claim]:
    values = measured.values
    return [
        Claim(
            name="outputs-backdoor",
            text="Outputs on data are blind to a change off their distribution.",
            where="figure 2",
            paper="blind",
            ours=values["output_cosine backdoor"],
            expected=near(1.0, ROUNDING),
            why="the data never reach the changed unit",
        ),
        Claim(
            name="tensor-backdoor",
            text="Tensor similarity sees the same change.",
            where="figure 2",
            paper="sees it",
            ours=values["similarity backdoor"],
            expected=at_most(0.9),
            why="one of 48 units, of the size of an output",
        ),
    ]


def _exactness(measured: Measured) -> list[Claim]:
    values = measured.values
    return [
        Claim(
            name="gaussian-exact",
            text="E<A(x), B(x)> is a weight-space inner product (two layers, all pairings).",
            where="section 2.2",
            paper="equal",
            ours=values["deviation from sampling"],
            expected=at_most(ERRORS),
            why="standard errors between the closed form and sampling",
        ),
        Claim(
            name="closure-exact",
            text="Evaluated layer by layer, as the authors' code does, it is the same number.",
            where="figure 5",
            paper="closed form",
            ours=values["closure apart"],
            expected=at_most(ROUNDING),
            why="difference of the two cosines, up to rounding",
            note="hidden states are not Gaussian, so from two nonlinear layers on this is an "
            "approximation",
        ),
        Claim(
            name="tree-discriminates",
            text="Symmetrised layer by layer, similarity is 1 if and only if polynomials agree.",
            where="appendix A.1",
            paper=1.0,
            ours=values["tree of one polynomial"],
            expected=near(1.0, ROUNDING),
            why="(x1 x1)(x2 x2) and (x1 x2)(x1 x2) are one polynomial",
            note="1 implies equal functions, but not the other way round",
        ),
        Claim(
            name="symmetric-discriminates",
            text="Symmetrised over all legs, similarity is 1 if and only if polynomials agree.",
            where="equation 3",
            paper=1.0,
            ours=values["symmetric of one polynomial"],
            expected=near(1.0, ROUNDING),
            why="(x1 x1)(x2 x2) and (x1 x2)(x1 x2) are one polynomial",
        ),
        Claim(
            name="gaussian-finer",
            text="The Gaussian metric is a strictly finer equivalence than symmetrisation.",
            where="appendix A.3",
            paper="finer",
            ours=values["gaussian apart"],
            expected=at_least(1e-6),
            why="it would tell apart copies that symmetrisation calls equal",
            note="both are 1 exactly for proportional functions, so they are one equivalence",
        ),
    ]


_WORDS = {
    "permuted": "permuted in its hidden units",
    "swapped": "swapped left and right in half of its units",
    "rescaled": "rescaled, unit by unit and as a whole",
    "both": "permuted and swapped",
}
