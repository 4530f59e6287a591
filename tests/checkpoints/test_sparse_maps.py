"""Matrices of convolutions and of other maps of few coordinates, found by runs, beside dense ones."""

import jax
import numpy as np
import pytest
from closeness import LARGEST, assert_close
from refusals import refused

import tnsim
from tnsim.checkpoints import affine_values
from tnsim.checkpoints.affine_values import LinearMap, pattern_of
from tnsim.models.arrays import SparseMatrix, is_sparse, written_out

torch = pytest.importorskip("torch")
from module_cases import Module, assert_same  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402


def linear_map(matrix, grids, block=5):
    reads = (matrix != 0).astype(float)
    return LinearMap(
        lambda points: points @ matrix.T, grids, len(matrix), block, lambda points: points @ reads.T
    )


def supports(draw, rows, grids):
    """A matrix of rows that read up to three indices on each axis of grids, or nothing."""
    parts = []
    for shape in grids:
        part = np.ones((rows, 1))
        for length in shape:
            reads = draw.random((rows, length)).argsort(1) < draw.integers(4, size=(rows, 1))
            part = (part[:, :, None] * reads[:, None]).reshape(rows, -1)
        parts.append(part)
    boxes = np.concatenate(parts, axis=1)
    return boxes * draw.normal(size=boxes.shape)


@pytest.mark.parametrize("seed", range(20))
def test_entries_of_boxes_are_found_by_runs(seed):
    """Index sets on axes of several grids, vectors among them; rows may read nothing."""
    draw = np.random.default_rng(seed)
    grids = [((12, 15),), ((1, 3, 9, 8),), ((7, 8), (5, 16)), ((120,),), ((6, 11), (48,), (1,))]
    shapes = grids[seed % len(grids)]
    matrix = supports(draw, int(draw.integers(60, 90)), shapes)
    matrix[draw.random(len(matrix)) < 0.2] = 0
    linear = linear_map(matrix, shapes)
    pattern = pattern_of(linear)
    assert pattern is not None
    found = pattern.matrix_of(linear)
    assert (np.asarray(found) == matrix).all()
    smaller, trimmed = pattern.trimmed(found)
    assert (np.asarray(trimmed) == matrix).all()
    assert smaller.columns == SparseMatrix.of(matrix).columns
    assert (np.asarray(smaller.matrix_of(linear)) == matrix).all()
    order = np.diff(np.where(trimmed.columns.filled, trimmed.columns.array, 10**6), axis=1)
    assert ((order > 0) | ~trimmed.columns.filled[:, 1:]).all()


def test_rows_that_read_much_stay_dense(rng):
    full = rng.normal(size=(80, 120))
    assert pattern_of(linear_map(full, ((10, 12),))) is None
    # A quarter of the row is what pays, and a vector of prime length has no axes.
    quarter = full * (np.arange(120) < 30)
    assert pattern_of(linear_map(quarter, ((12, 10),))).columns.array.shape == (80, 30)
    assert pattern_of(linear_map(full * (np.arange(120) < 31), ((12, 10),))) is None
    assert pattern_of(linear_map(np.eye(127), ((127,),))) is None
    assert pattern_of(linear_map(np.eye(60), ((6, 10),))) is None  # small


def built(forward, parts, seed=0):
    """A forward pass over named parts, of inputs in float64."""
    torch.manual_seed(seed)
    return Module(forward, **{name: make() for name, make in parts.items()}).double().eval()


def conv(names, *arguments, **settings):
    return {name: lambda: nn.Conv2d(*arguments, **settings) for name in names}


def readout(d_in):
    return {"out": lambda: nn.Linear(d_in, 3)}


def norm(channels):
    """Batch norm that has seen inputs."""
    module = nn.BatchNorm2d(channels)
    for tensor in (module.running_mean, module.weight.data, module.bias.data):
        tensor.normal_()
    module.running_var.uniform_(0.5, 2)
    return module


def once(m, x):
    return m.out((m.a(x) * m.b(x)).flatten(1))


def twice(m, x):
    state = m.a(x) * m.b(x)
    return m.out((m.c(state) * m.d(state)).flatten(1))


def pooled(m, x):
    state = functional.avg_pool2d(m.norm(m.a((x - 0.13) / 0.3) * m.b((x - 0.13) / 0.3)), 2)
    return m.out((m.c(state) * m.d(state)).flatten(1))


def thrice(m, x):
    state = m.a(x) * m.b(x)
    state = m.c(state) * m.d(state)
    return m.e(state) * m.f(state)


def residual(m, x):
    state = m.a(x) * m.b(x)
    return m.out((state + m.c(state) * m.d(state)).flatten(1))


def input_again(m, x):
    """The image itself is carried beside the first layer."""
    state = m.a(x) * m.b(x)
    return m.out((m.c(state) * m.d(state) + m.e(x)).flatten(1))


def three_factors(m, x):
    """Half a product is hidden units still, each entry half of a unit."""
    return m.out((0.5 * (m.a(x) * m.b(x)) * m.c(x)).flatten(1))


def local(m, x):
    """Filters of their own for every patch."""
    patches = functional.unfold(x, 3)
    left, right = (torch.einsum("bpl,lpc->blc", patches, m.get_parameter(n)) for n in "ab")
    return m.out((left * right).flatten(1))


def filters():
    return nn.Parameter(torch.randn(100, 9, 3))


def from_vectors(m, x):
    """Images as vectors, and hidden units as vectors."""
    image = x.reshape(-1, 1, 12, 12)
    state = (m.a(image).flatten(1) * m.b(image).flatten(1)).reshape(-1, 3, 10, 10)
    return m.out((m.c(state) * m.d(state)).flatten(1))


NETWORKS = {  # parts, shape of an image, and entries in a row of each sparse matrix
    "padding": (
        once,
        conv("a", 3, 4, 3, padding=1) | conv("b", 3, 4, 3, padding=1, bias=False) | readout(576),
        (3, 12, 12),
        [27, 27],
    ),
    "stride": (
        twice,
        conv("ab", 3, 4, 3, padding=1, stride=2) | conv("cd", 4, 4, 3) | readout(144),
        (3, 16, 16),
        [27, 27, 1, 36, 36],
    ),
    "groups and dilation": (
        twice,
        conv("a", 2, 4, 3, dilation=2, groups=2)
        | conv("b", 2, 4, 3, dilation=2)
        | conv("c", 4, 8, 3, groups=4)
        | conv("d", 4, 8, 3)
        | readout(800),
        (2, 16, 16),
        [9, 18, 1, 9, 36],
    ),
    "normalised and pooled": (
        pooled,
        conv("ab", 3, 4, 3, padding=1)
        | {"norm": lambda: norm(4)}
        | conv("cd", 4, 5, 3, padding=1)
        | readout(320),
        (3, 16, 16),
        [27, 27, 4, 36, 36],
    ),
    "three layers": (
        thrice,
        conv("ab", 1, 2, 3, padding=1)
        | conv("cd", 2, 3, 3, padding=1)
        | conv("e", 3, 2, 1)
        | conv("f", 3, 2, 3, padding=1),
        (1, 10, 10),
        [9, 9, 1, 18, 18, 1, 3, 27, 1],
    ),
    "residual": (
        residual,
        conv("ab", 2, 4, 3, padding=1) | conv("cd", 4, 4, 3, padding=1) | readout(400),
        (2, 10, 10),
        [18, 18, 1, 36, 36, 1],
    ),
    "the input again": (
        input_again,
        conv("ab", 1, 4, 3) | conv("cd", 4, 4, 3, padding=1) | conv("e", 1, 4, 3) | readout(400),
        (1, 12, 12),
        [9, 9, 1, 36, 36],
    ),
    "three factors": (three_factors, conv("abc", 1, 4, 3) | readout(400), (1, 12, 12), [9, 9, 9]),
    "local filters": (local, {"a": filters, "b": filters} | readout(300), (1, 12, 12), [9, 9]),
    "vectors": (
        from_vectors,
        conv("ab", 1, 3, 3) | conv("cd", 3, 4, 3) | readout(256),
        (144,),
        [9, 9, 1, 27, 27],
    ),
    "a factor for all channels": (
        once,
        conv("a", 1, 1, 3) | conv("b", 1, 8, 3) | readout(800),
        (1, 12, 12),
        [9, 9],
    ),
}


def case(name, seed=0):
    forward, parts, shape, _ = NETWORKS[name]
    return built(forward, parts, seed), torch.zeros(1, *shape)


def sparse_matrices(model):
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, SparseMatrix))
    return [leaf for leaf in leaves if isinstance(leaf, SparseMatrix)]


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_of_convolutions_hold_few_numbers(name, rng, monkeypatch):
    """Layers compute the module's outputs, and are entry by entry those of dense matrices.

    Another network of the same module has the same places.
    """
    module, example = case(name)
    model = tnsim.from_module(module, inputs=example)
    entries = [matrix.values.shape[1] for matrix in sparse_matrices(model)]
    # Layers are listed factor by factor, with the matrix of the output last.
    assert sorted(entries) == sorted(NETWORKS[name][-1])
    other, _ = case(name, seed=1)
    second = tnsim.from_module(other, inputs=example)
    assert jax.tree.structure(second) == jax.tree.structure(model)
    x = rng.normal(size=(3, *example.shape[1:]))
    for network, read in ((module, model), (other, second)):
        assert_same(read, network, x, rtol=1e-12)
    monkeypatch.setattr(affine_values, "FEWEST", 2**60)
    with tnsim.using(tnsim.Session()):
        dense = tnsim.from_module(module, inputs=example)
    assert not is_sparse(dense)
    for found, expected in zip(
        jax.tree.leaves(written_out(model)), jax.tree.leaves(dense), strict=True
    ):
        assert_close(found, expected, scale=LARGEST, rtol=1e-12)


def test_weights_that_are_zero_keep_their_places(tmp_path):
    """A run that starts at zero, with a pruned filter, has the places of all its checkpoints."""
    name = "normalised and pooled"
    networks = [case(name, seed)[0] for seed in range(3)]
    with torch.no_grad():
        networks[0].norm.weight.zero_()
        networks[0].c.weight[1].zero_()
        networks[0].a.weight[:, 2].zero_()
        networks[2].d.weight[0, 0] = 0
    for step, network in enumerate(networks):
        torch.save(network.state_dict(), tmp_path / f"step_{step}.pt")
    example = case(name)[1]
    with tnsim.using(tnsim.Session()):
        models = list(tnsim.load(tmp_path, networks[0], inputs=example))
    with tnsim.using(tnsim.Session()):
        models.append(tnsim.from_module(networks[1], inputs=example))
    assert len({jax.tree.structure(model) for model in models}) == 1
    x = np.random.default_rng(0).normal(size=(3, *example.shape[1:]))
    for network, model in zip((*networks, networks[1]), models, strict=True):
        assert_same(model, network, x, rtol=1e-12)


def masked(m, x):
    """A locally connected product of which a buffer says what each unit reads."""
    one, two = (torch.einsum("uhw,bhw->bu", w * m.mask, x) for w in (m.a, m.b))
    return one * two


@pytest.mark.slow
def test_places_that_another_checkpoint_lacks_are_found_anew(rng):
    example = torch.zeros(1, 10, 12)
    with tnsim.using(tnsim.Session()):
        for _ in range(2):
            mask = torch.as_tensor(supports(rng, 80, ((10, 12),)) != 0).reshape(80, 10, 12)
            filters = {name: nn.Parameter(torch.randn(mask.shape)) for name in "ab"}
            module = Module(masked, mask=mask.double(), **filters).double()
            model = tnsim.from_module(module, inputs=example)
            wanted = (module.a * module.mask).detach().numpy().reshape(80, 120)
            assert_close(np.asarray(model.layers[0].left), wanted, scale=LARGEST, rtol=1e-12)


def test_what_is_stored_is_bounded(monkeypatch):
    """The refusal counts the numbers of rows, not zeros between them."""
    module, example = case("padding")
    monkeypatch.setattr(affine_values, "LARGEST", 10_000)
    message = r"576 x 432 numbers with 27 in a row, .* 370 such rows: .*images\)$"
    with tnsim.using(tnsim.Session()), refused(message, tnsim.TooLarge):
        tnsim.from_module(module, inputs=example)


def test_a_layer_is_pooled_though_its_dense_matrix_is_too_large(monkeypatch):
    """A state of few numbers is kept, so that rows of the next layer read nine pixels of it."""
    from tnsim.checkpoints import affine_values

    def halved(m, x):
        state = functional.avg_pool2d(x, 2)
        return m.a(state) * m.b(state)

    module = built(halved, conv("ab", 1, 4, 3))
    monkeypatch.setattr(affine_values.Map, "is_stored", False)  # no dense matrix at all
    model = tnsim.from_module(module, inputs=torch.zeros(1, 1, 24, 24))
    entries = [matrix.values.shape for matrix in sparse_matrices(model)]
    assert entries == [(144, 4), (400, 9), (400, 9), (400, 1)]


@pytest.mark.slow
def test_no_array_of_a_wide_network_is_large(rng):
    """Of two layers of 16 channels on 28 x 28 pixels, where a dense matrix takes 1.2 GiB."""
    parts = conv("ab", 1, 16, 3, padding=1) | conv("cd", 16, 16, 3, padding=1)
    module = built(twice, parts | {"out": lambda: nn.Linear(12544, 10)})
    model = tnsim.from_module(module, inputs=torch.zeros(1, 1, 28, 28))
    assert model.layers[1].left.values.shape == (12544, 144)
    assert max(leaf.nbytes for leaf in jax.tree.leaves(model)) < 2**24
    x = rng.normal(size=(2, 1, 28, 28))
    assert_same(model, module, x, rtol=1e-12)


@pytest.mark.slow
def test_rows_of_activations_and_of_gradients_are_dense():
    """Kernels of activations and PyTorch's autograd read dense rows."""
    module, example = case("padding")
    live = tnsim.torch.from_module(module, inputs=example)
    assert not is_sparse(live) and live.layers[0].left.requires_grad
    fixed = tnsim.torch.from_module(module.requires_grad_(False), inputs=example)
    assert is_sparse(fixed)
    rectified = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))
    assert not is_sparse(tnsim.from_module(rectified, inputs=torch.zeros(1, 1, 12, 12)))
