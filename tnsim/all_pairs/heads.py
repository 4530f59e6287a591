"""Heads against heads: of two transformers, and of one, where a head reads what another writes.

An inner product of two heads needs no matrix of the width of the stream. With lifted maps Q, K of
one head and Q', K' of the other, inputs x_q and x_k that are independent, and M = E[x x'^T] between
the two streams,

    E[(x_q^T Q^T R K x_k) (x_q'^T Q'^T R' K' x_k')] = sum((Q M Q'^T) * (R (K M K'^T) R'^T)),

two matrices of the width of a head. An OV circuit is the same, with the transposed output in the
place of the queries and the identity, or the product of the unembeddings, in the place of M.

*Composition scores* say how much a head reads of what a head of an earlier layer writes. With the
matrices `W_QK = Q^T K` and `W_OV = O V` of heads, the later head 2 reads the output of the earlier
head 1 as its queries, keys or values:

    Q    |K_2^T Q_2 O_1 V_1|       K    |Q_2^T K_2 O_1 V_1|       V    |O_2 V_2 O_1 V_1|,

each divided by the norms of the two matrices of which it is the product. All are products of
matrices as wide as a head. Of two matrices of these norms in a stream of width d, turned against
each other at random, the mean square of the score is 1 / d.

Source:
    Elhage et al., A Mathematical Framework for Transformer Circuits, 2021, on composition.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from tnsim.all_pairs.result import require_xarray
from tnsim.all_pairs.run import pairwise
from tnsim.circuits.parts import Anatomy, Parts, naming_file, opened
from tnsim.circuits.standard_parts import (
    Circuits,
    OwnParts,
    PartName,
    StandardParts,
    View,
    checked_view,
)
from tnsim.engine import precision
from tnsim.engine.precision import Arithmetic
from tnsim.errors import MissingExtra, ModelError, UnsupportedLayer
from tnsim.options import checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import xarray as xr


Moments: TypeAlias = tuple[np.ndarray | None, np.ndarray | None]
"""Matrices between left maps and between right maps of two models, None for the identity."""
_KINDS = ("qk", "ov")
_AT_ONCE = 2**25  # entries of the products of a block of heads of one side with all of the other


class _Side(NamedTuple):
    """The heads of a single model.

    Attributes:
        circuits: Maps of the heads.
        inputs: Inputs of the maps, (samples, width + 1), with a one behind; None for standard
            normal streams, and for maps that hold the values on all inputs.
        outputs: Matrix that reads the outputs of OV circuits, (logits, width); None for the
            identity.
    """

    circuits: Circuits
    inputs: np.ndarray | None = None
    outputs: np.ndarray | None = None


@checked(own="distances")
def heads(
    a: Any,
    b: Any,
    kind: str = "qk",
    *,
    through: str | None = None,
    distances: Sequence[int] = (1,),
    centred: bool = False,
) -> xr.Dataset:
    """Similarity of every head of one transformer with every head of another, and their matching.

    Args:
        a, b: Transformers, as in `parts`, or what `parts` returned for one.
        kind: "qk" for scores, "ov" for what heads add to the stream.
        through: None where both streams have one basis, as along a training run: inputs are
            standard normal streams behind the norm. "embedding" for models with one vocabulary:
            inputs are embeddings of all tokens, normalised as a layer normalises them, and outputs
            are read by the final norm's gain and the unembedding, so that neither the basis nor
            the width of a stream matters.
        distances: Numbers of positions by which keys stand before queries, over which inner
            products of rotated scores are added up.
        centred: Whether scores are less their mean over keys, as in `parts`.

    Returns:
        A Dataset: `similarity` (a, b), float64 in [-1, 1]; `inner` (a, b), the inner products;
        `became` (a), the head of `b` that each head of `a` is matched with, empty where `b` has
        fewer heads; `matched` (a), the similarity with it, NaN where there is none. The matching
        has the largest sum of similarities. `chance` (a) is what the most alike of all pairs
        reaches in one of twenty cases where the heads of `b` are random matrices: a match that is
        no better says nothing, and attribute `by_chance` names it. Attribute `symmetry` says which
        changes of basis inside a head change nothing.

    Raises:
        ModelError: An argument is unknown, widths or vocabularies differ, or a head is zero.
        UnsupportedLayer: A model has no such parts.
        MissingExtra: xarray or scipy is not installed.

    Example:
        >>> from pathlib import Path
        >>> import tnsim
        >>> run = tnsim.load(Path(tnsim.__file__).parent / "data" / "induction")
        >>> found = tnsim.heads(run[-2], run[-1], "ov")
        >>> found.became.sel(a="layer 2 head 3").item()
        'layer 2 head 3'

    Source:
        Inner products of QK and OV circuits (Elhage et al., A Mathematical Framework for
        Transformer Circuits, 2021) under independent inputs.
    """
    require_xarray()
    if kind not in _KINDS:
        raise ModelError(f"kind of heads is qk or ov, found {kind!r}")
    if through not in (None, "embedding"):
        raise ModelError(f"through is None or 'embedding', found {through!r}")
    if centred and (kind != "qk" or through is not None):
        raise ModelError(
            "centred are scores, kind='qk', of streams of mean 0, through=None: leave centred out"
        )
    view = checked_view(distances, "fold", centred)
    first, second = (anatomy_of(model) for model in (a, b))
    if not (first.names(kind) and second.names(kind)):
        raise ModelError("the model has no head")
    own = [isinstance(anatomy, OwnParts) for anatomy in (first, second)]
    if kind == "qk" and all(own) and through is None:
        inner, norms, names = _of_products_of_scores(first, second, view)
        sides = None
    else:
        with naming_file(a):
            bra = _side(first, kind, through, view)
        with naming_file(b):
            ket = _side(second, kind, through, view)
        _check_sides(bra, ket, through)
        inner = _inner(bra.circuits, ket.circuits, _moments(bra, ket))
        norms = [_squares(side) for side in (bra, ket)]
        names = [labels_of(side.circuits.names) for side in (bra, ket)]
        sides = bra, ket
    for side, label_list, squares in zip(sides or (None, None), names, norms, strict=True):
        if not np.isfinite(squares).all():
            raise ModelError(
                "squared norms of heads are beyond float64: scale down the maps of heads, which "
                "changes no similarity"
            )
        if side is not None:
            turns = side.circuits.turns
            # Each distance has a term, whose rotation changes no length.
            apart = squares / (1 if turns is None else len(turns))
            _report_cancellation(side.circuits.names, _row_lengths(side), apart, "the similarity")
        if not (squares > 0).all():
            zero = label_list[int(np.argmin(squares))]
            raise ModelError(f"{zero} is the zero function: it has no similarity")
    # What is beyond 1 now is rounding.
    similarity = np.clip(inner / np.sqrt(np.outer(*norms)), -1.0, 1.0)
    spread = np.full(len(names[0]), np.nan)
    if sides is not None:
        spread = _spread_of_chance(*sides, norms[0])
    about = {
        "kind": kind,
        "through": through or "",
        "symmetry": _symmetry(kind, view, first, second),
        "distances": list(view.distances),
    }
    return _labelled(similarity, inner, names, _chance(spread, similarity.size), about)


def _spread_of_chance(a: _Side, b: _Side, squares: np.ndarray) -> Float[np.ndarray, " A"]:
    """Standard deviations of the similarities of heads with random matrices in the streams of b.

    Let B = L^T R have normal entries in L and R, and let T be the matrix with <A, B> = sum(T * B).
    Then `E <A, B>^2 = r |T|^2`, and `E |B|^2 = r tr(M_L) tr(M_R)` for the moments M of the two
    streams of b, over r rows of L and R. Rotations R_d of a single distance change neither. NaN for
    several distances, where the matrices of one head depend on each other.
    """
    turns = a.circuits.turns if a.circuits.turns is not None else b.circuits.turns
    if turns is not None and len(turns) > 1:
        return np.full(len(a.circuits.names), np.nan)
    crossed, own = _moments(a, b), _moments(b, b)
    traces = []
    maps = []
    for moment, mine, left, right in zip(
        crossed,
        own,
        (b.circuits.left, b.circuits.right),
        (a.circuits.left, a.circuits.right),
        strict=True,
    ):
        traces.append(float(left.shape[-1]) if mine is None else float(np.trace(mine)))
        maps.append(right if moment is None else right @ moment)
    if a.circuits.turns is not None:
        maps[1] = np.einsum("ij,hjd->hid", a.circuits.turns[0], maps[1])
    grams = [side @ side.swapaxes(-1, -2) for side in maps]
    return np.sqrt(np.einsum("hij,hij->h", *grams) / (squares * traces[0] * traces[1]))


def _chance(spread: np.ndarray, pairs: int) -> np.ndarray:
    """What the largest of several similarities by chance stays below in 19 of 20 cases."""
    return spread * NormalDist().inv_cdf(0.95 ** (1 / pairs))


def anatomy_of(model: Any) -> Anatomy:
    """A transformer ready to be taken apart, or that of parts which were taken."""
    return model.anatomy if isinstance(model, Parts) else opened(model)


def labels_of(names: Iterable[PartName]) -> list[str]:
    """Labels of heads, whatever part of them is compared."""
    return [f"layer {name.layer} head {name.head}" for name in names]


def _labelled(
    similarity: Float[np.ndarray, "A B"],
    inner: Float[np.ndarray, "A B"],
    names: list[list[str]],
    chance: Float[np.ndarray, " A"],
    about: dict[str, Any],
) -> xr.Dataset:
    """The result with its matching."""
    import xarray

    rows, columns = _matching(similarity)
    became = np.full(len(names[0]), "", dtype=object)
    matched = np.full(len(names[0]), np.nan)
    became[rows] = np.array(names[1], dtype=object)[columns]
    matched[rows] = similarity[rows, columns]
    about["by_chance"] = [name for n, name in enumerate(names[0]) if matched[n] <= chance[n]]
    variables = {
        "similarity": (("a", "b"), similarity),
        "inner": (("a", "b"), inner),
        "became": ("a", became.astype(str)),
        "matched": ("a", matched),
        "chance": ("a", chance),
    }
    return xarray.Dataset(variables, {"a": names[0], "b": names[1]}, about)


def _matching(similarity: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the matching with the largest sum."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise MissingExtra("scipy", "pairwise", "matching heads") from None
    return linear_sum_assignment(similarity, maximize=True)


def _side(anatomy: Anatomy, kind: str, through: str | None, view: View) -> _Side:
    """The heads of a model, with their inputs and their readers."""
    if through is not None and kind == "qk" and isinstance(anatomy, OwnParts):
        return _Side(anatomy.scores_of_tokens(view))
    circuits = anatomy.circuits(kind, view)
    if through is None:
        return _Side(circuits)
    embedded, unembedding = anatomy.ends(kind)
    # The maps are lifted and read a constant one behind the coordinates.
    lifted = np.concatenate([embedded, np.ones((len(embedded), 1))], axis=1)
    return _Side(circuits, lifted, unembedding)


def _check_sides(a: _Side, b: _Side, through: str | None) -> None:
    """Refuse models whose heads have no inner product."""
    distances = [1 if side.circuits.turns is None else len(side.circuits.turns) for side in (a, b)]
    widths = [side.circuits.right.shape[-1] for side in (a, b)]
    if through is None and widths[0] != widths[1]:
        raise ModelError(
            f"streams have widths {widths[0] - 1} and {widths[1] - 1}: heads of models with one "
            'vocabulary are compared by through="embedding"'
        )
    if (a.inputs is None) != (b.inputs is None):
        raise ModelError(
            "scores of bilinear attention are products of two bilinear forms, scores of standard "
            "attention are single forms: either kind is compared with its own"
        )
    sizes = widths if a.inputs is None else [len(a.inputs), len(b.inputs)]  # type: ignore[arg-type]
    if through is not None and sizes[0] != sizes[1]:
        raise ModelError(
            f"vocabularies have {sizes[0]} and {sizes[1]} tokens: through the embeddings tokens "
            "must be the same"
        )
    if distances[0] != distances[1]:
        raise ModelError(
            "scores of one model depend on distance and scores of the other do not: give one "
            f"distance, found {max(distances)}"
        )


def _moments(a: _Side, b: _Side) -> Moments:
    """`E[x x'^T]` between the streams of two models, and what joins outputs of OV circuits."""
    if a.inputs is None or b.inputs is None:
        return None, None
    inputs = a.inputs.T @ b.inputs / len(a.inputs)
    if a.outputs is None or b.outputs is None:
        return inputs, inputs
    return a.outputs.T @ b.outputs, inputs


def _inner(a: Circuits, b: Circuits, moments: Moments) -> Float[np.ndarray, "A B"]:
    """Inner products of all heads of one model with all heads of another."""
    # M is applied to the maps of the second model once, (Q' M^T), so that every pair of heads costs
    # two products of head width.
    left, right = (
        maps if moment is None else maps @ moment.T
        for maps, moment in zip((b.left, b.right), moments, strict=True)
    )
    block = max(1, _AT_ONCE // (a.left.shape[1] * left[..., 0].size))
    parts = []
    for start in range(0, len(a.names), block):
        chosen = slice(start, start + block)
        # Shape (heads of a, rows of a, heads of b, rows of b), for queries and for keys.
        queries = _crossed(a.left[chosen], left)
        keys = _turned(_crossed(a.right[chosen], right), a.turns, b.turns)
        # The sum over entries of the two matrices of each pair of heads.
        parts.append(np.einsum("aibj,aibj->ab", queries, keys))
    return np.concatenate(parts)


def _crossed(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of all rows of all heads, (heads of a, rows of a, heads of b, rows of b)."""
    # All rows of all heads in a single matrix product.
    products = a.reshape(-1, a.shape[-1]) @ b.reshape(-1, b.shape[-1]).T
    return products.reshape(*a.shape[:2], *b.shape[:2])


def _turned(keys: np.ndarray, a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray:
    """The sum over distances of `R keys R'^T`, where R is the identity for None."""
    if a is None and b is None:
        return keys
    count = len(a) if a is not None else len(b)  # type: ignore[arg-type]
    total = np.zeros_like(keys)
    for n in range(count):
        turned = keys
        if a is not None:
            # R acts on the rows of a (axis 1 of keys) and R' on the rows of b (the last axis).
            turned = np.tensordot(a[n], turned, axes=(1, 1)).swapaxes(0, 1)
        if b is not None:
            turned = turned @ b[n].T
        total += turned
    return total


def _squares(side: _Side) -> Float[np.ndarray, " A"]:
    """Squared norms of all heads of a model."""
    moments, (names, left, right, turns) = _moments(side, side), side.circuits
    alone = [slice(n, n + 1) for n in range(len(names))]
    single = (Circuits(names[n], left[n], right[n], turns) for n in alone)
    return np.array([_inner(head, head, moments)[0, 0] for head in single])


def _row_lengths(side: _Side) -> list[Float[np.ndarray, "A r"]]:
    """Lengths of the rows of both maps of every head, as the inputs and outputs measure them."""
    lengths = []
    both = side.circuits.left, side.circuits.right
    for maps, moment in zip(both, _moments(side, side), strict=True):
        squares = np.einsum("hrd,hrd->hr", maps if moment is None else maps @ moment.T, maps)
        lengths.append(np.sqrt(np.maximum(squares, 0.0)))
    return lengths


def _report_cancellation(
    names: Sequence[PartName],
    lengths: Sequence[Float[np.ndarray, "A r"]],
    squares: Float[np.ndarray, " A"],
    what: str,
) -> None:
    """Refuse, or warn of, heads that are small sums of large rows, in which digits are lost.

    Args:
        names: Names of the heads.
        lengths: Lengths of the rows of both maps of every head. Terms of the squared norm are
            products of two rows of either map.
        squares: Squared norms of the heads.
        what: What is computed of a head.
    """
    terms = (lengths[0] * lengths[1]).sum(axis=1) ** 2
    arithmetic = Arithmetic(2, "float64")
    with np.errstate(over="ignore"):  # beyond all bounds, as is what rounding takes below zero
        errors = arithmetic.rounding * terms / np.maximum(squares, np.finfo(np.float64).tiny)
    worst = int(np.argmax(errors))
    subject = f"{what} of {labels_of(names)[worst]}"
    precision.report(float(errors[worst]), subject, arithmetic)


def _of_products_of_scores(
    a: Anatomy, b: Anatomy, view: View
) -> tuple[np.ndarray, list[np.ndarray], list[list[str]]]:
    """Inner products of QK circuits of bilinear attention, and squared norms, by `pairwise`."""
    sides = [Parts(model, ("qk",), view) for model in (a, b)]
    result = pairwise(dict(sides[0]), other=dict(sides[1]))
    inner = result["sign"].values * np.exp(result["log_inner"].values)
    norms = [np.exp(result[f"log_norm_{side}"].values) for side in "ab"]
    return inner, norms, [labels_of(side.names) for side in sides]


def _symmetry(kind: str, view: View, *models: Anatomy) -> str:
    """The changes of basis inside a head that change no similarity, in a sentence."""
    if kind == "ov":
        return "any invertible change of basis of the values of a head changes nothing"
    turned = any(
        isinstance(model, StandardParts) and model.transformer.frequencies is not None
        for model in models
    )
    own = any(isinstance(model, OwnParts) for model in models)
    if not turned and not own:
        return "any invertible change of basis of queries and keys of a head changes nothing"
    if own:
        return (
            "scores are products of two bilinear forms, which may change places; where they are "
            "rotated, only changes of basis that commute with the rotations change nothing"
        )
    return (
        "rotated coordinates of queries and keys may change only as commutes with the rotations: "
        "a scaling and a turn for each frequency, equal for query and inverse for key; a general "
        f"change of basis makes another head. Added up over {len(view.distances)} distances: at a "
        "single distance more heads look equal than are"
    )


def composition(model: Any) -> xr.DataArray:
    """Composition scores of all pairs of heads of a transformer, by queries, keys and values.

    Biases are left out, rotations of positions too (scores at distance 0); gains of norms are
    folded into the maps behind them.

    Args:
        model: A transformer, as in `parts`, or what `parts` returned for one.

    Returns:
        Scores over (leg, reader, writer), float64 in [0, 1]; legs are Q, K and V. NaN where the
        writer stands in no earlier layer. Attribute `chance` is the root of the mean square for
        matrices that are turned at random.

    Raises:
        ModelError: The model has a single layer of heads, or a head is zero.
        UnsupportedLayer: The model has no such parts, or bilinear attention.
        MissingExtra: xarray is not installed.

    Example:
        >>> import transformers, tnsim
        >>> sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "vocab_size": 9, "n_positions": 16}
        >>> ends = {"bos_token_id": None, "eos_token_id": None}
        >>> net = transformers.GPT2Model(transformers.GPT2Config(**sizes, **ends))
        >>> found = tnsim.composition(net)
        >>> found.dims, found.sel(leg="K", reader="layer 1 head 0").dropna("writer").writer.values
        (('leg', 'reader', 'writer'), array(['layer 0 head 0', 'layer 0 head 1'], dtype='<U14'))
    """
    require_xarray()
    import xarray

    anatomy = anatomy_of(model)
    if isinstance(anatomy, OwnParts):
        raise UnsupportedLayer(
            "scores of bilinear attention are products of two forms, and composition scores are "
            "norms of one: tnsim.paths(model, legs=True) has exact shares of what heads read"
        )
    view = checked_view([0], "fold")
    with naming_file(model):
        scores, values = anatomy.circuits("qk", view), anatomy.circuits("ov", view)
    # Maps of the stream alone, without the biases in their last column.
    of_stream = (maps[..., :-1] for maps in (scores.left, scores.right, values.right))
    queries, keys, read, written = map(_in_own_units, (*of_stream, values.left))
    layers = np.array([name.layer for name in values.names])
    later = layers[:, None] > layers[None, :]
    if not later.any():
        raise ModelError("heads of one layer read nothing of each other: there is no composition")
    found = np.stack(
        [
            _scores(values.names, reads, beside, written, read)
            for reads, beside in ((queries, keys), (keys, queries), (read, written))
        ]
    )
    labels = labels_of(values.names)
    return xarray.DataArray(
        np.where(later, found, np.nan),
        {"leg": ["Q", "K", "V"], "reader": labels, "writer": labels},
        ("leg", "reader", "writer"),
        "composition",
        {"chance": float(written.shape[-1] ** -0.5)},
    )


def _in_own_units(maps: Float[np.ndarray, "H r d"]) -> Float[np.ndarray, "H r d"]:
    """The map of each head over its largest entry, so that no norm leaves the range of floats."""
    sizes = np.abs(maps).max(axis=(1, 2), keepdims=True)
    return maps / np.where(sizes > 0, sizes, 1.0)


def _scores(
    names: Sequence[PartName],
    reads: Float[np.ndarray, "H r d"],
    beside: Float[np.ndarray, "H r d"],
    written: Float[np.ndarray, "H v d"],
    read: Float[np.ndarray, "H v d"],
) -> Float[np.ndarray, "H H"]:
    """Norms of products `B^T R W^T V` over those of `B^T R` and `W^T V`, for all pairs of heads.

    Args:
        names: Names of the heads.
        reads: Maps R by which a later head reads the stream.
        beside: Maps B on the other side of its circuit.
        written: Transposed maps W by which an earlier head writes to the stream.
        read: Maps V by which it reads values.
    """
    outer, inner = (maps @ maps.swapaxes(-1, -2) for maps in (beside, read))
    # |B^T X V|^2 = trace of (B B^T) X (V V^T) X^T, with X = R W^T. One reader at a time: all pairs
    # of a thousand heads of width 128 would take 137 GB.
    squares = np.empty((len(reads), len(written)))
    for n, (gram, reader) in enumerate(zip(outer, reads, strict=True)):
        between = reader @ written.swapaxes(-1, -2)
        squares[n] = ((gram @ between @ inner) * between).sum(axis=(-1, -2))
    norms = []
    for gram, maps in ((outer, reads), (inner, written)):
        own = maps @ maps.swapaxes(-1, -2)
        norms.append(np.einsum("hij,hij->h", gram, own))
        lengths = [np.sqrt(x.diagonal(axis1=1, axis2=2)) for x in (gram, own)]
        _report_cancellation(names, lengths, norms[-1], "a composition score")
    if min(norm.min() for norm in norms) <= 0:
        raise ModelError("a head is the zero function: it has no composition score")
    return np.sqrt(np.clip(squares / np.outer(*norms), 0.0, 1.0))
