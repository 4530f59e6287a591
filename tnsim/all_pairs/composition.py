"""Composition scores: how much a head reads of what a head of an earlier layer writes.

With the matrices `W_QK = Q^T K` and `W_OV = O V` of heads, the later head 2 reads the output of the
earlier head 1 as its queries, keys or values:

    Q    |K_2^T Q_2 O_1 V_1|       K    |Q_2^T K_2 O_1 V_1|       V    |O_2 V_2 O_1 V_1|,

each divided by the norms of the two matrices of which it is the product. All are products of
matrices as wide as a head. Of two matrices of these norms in a stream of width d, turned against
each other at random, the mean square of the score is 1 / d.

Source:
    Elhage et al., A Mathematical Framework for Transformer Circuits, 2021, on composition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from tnsim.all_pairs.heads import anatomy_of, labels_of
from tnsim.all_pairs.result import require_xarray
from tnsim.circuits.own_parts import OwnParts
from tnsim.circuits.standard_parts import checked_view
from tnsim.errors import ModelError, UnsupportedLayer

if TYPE_CHECKING:
    import xarray as xr


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
    scores, values = anatomy.circuits("qk", view), anatomy.circuits("ov", view)
    # Maps of the stream alone, without the biases in their last column.
    queries, keys, read = (maps[..., :-1] for maps in (scores.left, scores.right, values.right))
    written = values.left
    layers = np.array([name.layer for name in values.names])
    later = layers[:, None] > layers[None, :]
    if not later.any():
        raise ModelError("heads of one layer read nothing of each other: there is no composition")
    found = np.stack(
        [
            _scores(reads, beside, written, read)
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


def _scores(
    reads: Float[np.ndarray, "H r d"],
    beside: Float[np.ndarray, "H r d"],
    written: Float[np.ndarray, "H v d"],
    read: Float[np.ndarray, "H v d"],
) -> Float[np.ndarray, "H H"]:
    """Norms of products `B^T R W^T V` over those of `B^T R` and `W^T V`, for all pairs of heads.

    Args:
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
    norms = [
        np.einsum("hij,hij->h", gram, maps @ maps.swapaxes(-1, -2))
        for gram, maps in ((outer, reads), (inner, written))
    ]
    if min(norm.min() for norm in norms) <= 0:
        raise ModelError("a head is the zero function: it has no composition score")
    return np.sqrt(np.maximum(squares, 0.0) / np.outer(*norms))
