"""Models from the things that callers have in hand: models, modules of PyTorch, paths of files.

Every verb passes its arguments through here first, so that `similarity(net, other)` and
`similarity("a.pt", "b.pt")` ask the same question as the models read from them. Readers of files
and modules are imported where a path or a module comes: most comparisons are of models.

*Folders of Hugging Face* become the modules that its library makes of them. Only networks whose
code is the library's own are made, of safetensors files or of pickles that PyTorch reads as weights
alone: a folder is trusted in nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnsim.checkpoints.adapters import adapted, base_of, merged_module
from tnsim.checkpoints.folders import OLD, WHOLE, model_file
from tnsim.checkpoints.formats import (
    ADAPTERS,
    Contents,
    configuration,
    contents,
    is_adapter,
    stored_tensor,
)
from tnsim.errors import (
    CheckpointError,
    ModelError,
    TnsimError,
    UnsupportedLayer,
    first_few,
    naming,
    refusing,
    require,
)
from tnsim.models.functions import is_function, is_module, with_output
from tnsim.models.model import AnyModel, Combination, Model, in_numpy, terms
from tnsim.options import is_list

log: logging.Logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from tnsim.checkpoints.load import Series


_FAULTS = {
    "missing_keys": "are not in its files",
    "mismatched_keys": "have other shapes in its files",
    "unexpected_keys": "are in its files and in no layer",
}
"""What the library reports of a folder that is not the network it names, in words."""


def given_model(
    given: Any,
    n_ctx: int | None = None,
    inputs: Any = None,
    output: str | int | None = None,
    runs: bool = False,
    shape: Sequence[int] = (),
) -> Any:
    """A model, a module or a path as the thing that is compared.

    Args:
        given: A model or combination, an `nn.Module`, the path of a file, or a plain function.
        n_ctx: Length of the sequences on which models with attention are compared.
        inputs: Inputs on which the comparison runs, None where weights are compared. Modules run on
            inputs as they are, also modules that compute no polynomial; and inputs say how long
            sequences are.
        output: Name or place of the output of functions with several, where these run on inputs.
        runs: Whether a module that cannot be read as a model is compared by its outputs, as a
            function.
        shape: Shape of an input of a module, (d,) or (positions, d), where the metric or the other
            side says it.

    Returns:
        A model or a combination, with weights in NumPy unless they are traced; a plain function,
        and a module that runs on inputs, unchanged but for the choice of an output. Anything else
        is returned unchanged too, for the check of the comparison to refuse.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: A file or module cannot be read as a model.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> given_model(model) is model, given_model(model, n_ctx=3).n_ctx
        (True, 3)
    """
    if isinstance(given, str | os.PathLike):
        given = read_model(given, n_ctx, inputs is not None)
    elif inputs is None and is_module(given):
        from tnsim.checkpoints.modules import compared_module

        n_ctx, width = length_and_width(n_ctx, shape)
        try:
            given = compared_module(given, n_ctx, width)
        except UnsupportedLayer as refusal:
            if not runs:
                raise
            _check_can_run(given, n_ctx, refusal, width)
    if not isinstance(given, AnyModel):
        # Plain functions and foreign objects are judged by the comparison itself.
        return with_output(given, output)
    given = in_numpy(given)
    # Inputs tell the length only where a model would otherwise be open in it.
    if n_ctx is None and given.n_ctx is None and any(part.attends for _, part in terms(given)):
        n_ctx = _length_of_inputs(inputs)
    return given if n_ctx is None else of_length(given, n_ctx)


def given_models(
    models: Any,
    n_ctx: int | None = None,
    inputs: Any = None,
    dialect: Any = None,
    output: str | int | None = None,
    runs: bool = False,
    shape: Sequence[int] = (),
) -> Any:
    """Models, modules or paths as the many models that are compared.

    Args:
        models: Sequence of models, modules or functions, mapping from labels to them, `Series`, a
            folder or a glob pattern, or paths of several files.
        n_ctx: Length of the sequences on which models with attention are compared.
        inputs: Inputs on which the comparison runs, as for `given_model`.
        dialect: Dialect of the files, as for `load`; of a module that is no model, the files run
            on the inputs as copies of the module.
        output: Name or place of an output, as for `given_model`.
        runs: Whether modules that cannot be read as models are compared by their outputs.
        shape: Shape of an input of modules, as for `given_model`.

    Returns:
        A `Series` of paths, else a mapping or a list of models and functions.

    Raises:
        CheckpointError, ModelError, UnsupportedLayer: A file or module cannot be read as a model,
            or a dialect is given for models that are no paths.

    Example:
        >>> import tnsim
        >>> model = tnsim.Model([tnsim.Linear([[1.0]])])
        >>> list(given_models({"first": model, "second": model}))
        ['first', 'second']
    """
    from tnsim.checkpoints.load import Series, modules_of

    whole = (str, os.PathLike, Mapping, Series, AnyModel)
    # Its layers are no networks to compare, as those in a ModuleList may be.
    if is_module(models) and "Sequential" in (kind.__name__ for kind in type(models).__mro__):
        raise ModelError(
            "many models are compared: give a sequence or a mapping of them, found one network, "
            f"{type(models).__name__}"
        )
    # A generator would be used up by the first look at it.
    if is_list(models) and not isinstance(models, whole):
        models = list(models)
    if inputs is not None and dialect is None and (folders := folders_of_networks(models)):
        networks = networks_of_folders(folders, n_ctx)
        return {
            label: given_model(network, n_ctx, inputs, output)
            for label, network in networks.items()
        }
    if is_path_or_paths(models):
        # Files of a dialect have a single output, state dicts of a module those of the module.
        of_module, width = is_module(dialect), None
        as_functions = of_module and (runs or inputs is not None)
        reader = dialect
        if of_module:
            from tnsim.checkpoints.modules import StatesOf, compared_module

            if inputs is None:
                n_ctx, width = length_and_width(n_ctx, shape)
            reader = StatesOf(merged_module(dialect), None, output, width)
        try:
            if as_functions:
                compared_module(dialect, n_ctx, width, output)  # norms are refused here too
            series = Series(models, reader, n_ctx)
        except (UnsupportedLayer, ModelError) as refused:
            if not as_functions:
                raise
            if inputs is None:
                _check_can_run(dialect, n_ctx, refused, width)
            log.info("the files run as modules on the inputs, since %s", refused)
            each = modules_of(models, dialect)
            return {label: with_output(module, output) for label, module in each.items()}
        return _at_length(series, None, inputs)
    if dialect is not None:
        raise ModelError(
            "a dialect reads files: give it with paths, or load a series by "
            "tnsim.load(paths, dialect); a state dict in memory is read by "
            "tnsim.from_state_dict(state, dialect)"
        )
    if isinstance(models, Series):
        return _at_length(models, n_ctx, inputs)
    if isinstance(models, Mapping):
        return {
            label: given_model(model, n_ctx, inputs, output, runs, shape)
            for label, model in models.items()
        }
    if isinstance(models, list):
        return [given_model(model, n_ctx, inputs, output, runs, shape) for model in models]
    return models


def length_and_width(n_ctx: int | None, shape: Sequence[int]) -> tuple[int | None, int | None]:
    """The length of sequences and the width of vectors with which a module is read.

    Args:
        n_ctx: Length that was asked for.
        shape: Shape of an input, as for `given_model`.

    Example:
        >>> length_and_width(None, (5, 3)), length_and_width(2, ())
        ((5, 3), (2, None))
    """
    n_ctx = shape[0] if n_ctx is None and len(shape) > 1 else n_ctx
    return n_ctx, shape[-1] if shape else None


def check_chooses(output: str | int | None, given: Iterable[Any]) -> None:
    """Refuse the choice of an output where no function is among what is compared.

    Raises:
        ModelError: An output is chosen, and all are models, of which every coordinate would count.

    Example:
        >>> check_chooses("logits", [abs])
    """
    if output is not None and not any(map(is_function, given)):
        raise ModelError(
            f"output={output!r} chooses among the outputs of a function or a module, "
            "and models alone are compared, by all coordinates: tnsim.slices(a, b) has them one by "
            "one, and a module is read with one of its outputs by tnsim.from_module(net, output=)"
        )


def is_path_or_paths(given: Any) -> bool:
    """Whether a value is a path, or a list of paths.

    Args:
        given: Any value.

    Returns:
        True for texts and paths, and for lists of one or more.

    Example:
        >>> is_path_or_paths("run"), is_path_or_paths(["a.pt", "b.pt"]), is_path_or_paths([])
        (True, True, False)
    """
    if isinstance(given, (list, tuple)) and given:
        return all(map(is_path_or_paths, given))
    return isinstance(given, (str, os.PathLike))


def folders_of_networks(models: Any) -> dict[str, Path]:
    """The folders of Hugging Face that a list names, or a run holds; none where others are too.

    A file of weights stands for the folder that it is in.

    Args:
        models: Anything that stands for many models, as for `given_models`.

    Returns:
        Folders by label, in order, each of which `given_model` runs on inputs.

    Example:
        >>> folders_of_networks({"first": "a"})
        {}
    """
    from tnsim.checkpoints.load import Series

    if not is_path_or_paths(models):
        return {}
    weights = (WHOLE, OLD, *ADAPTERS)
    if isinstance(models, (list, tuple)):
        if any(isinstance(path, (list, tuple)) for path in models):
            return {}
        paths = map(Path, models)
        models = [path.parent if path.name.startswith(weights) else path for path in paths]
    elif Path(models).is_file() or architecture_of(models):  # a single one
        return {}
    try:
        series = Series(models)
    except CheckpointError:  # said where the files are read as models
        return {}
    # Other files beside a configuration are no networks of its library.
    if not all(path.name.startswith(weights) for path in series.paths):
        return {}
    paths = zip(series.labels, series.paths, strict=True)
    folders = {label: path.parent for label, path in paths}
    is_known = len(folders) == len(series) and all(map(architecture_of, folders.values()))
    return folders if is_known else {}


def _check_can_run(module: Any, n_ctx: int | None, refusal: TnsimError, width: int | None) -> None:
    """Raise the refusal to read a module, if nothing says which inputs the module takes."""
    from tnsim.checkpoints.module_calls import AN_EXAMPLE, shape_of_inputs

    try:
        shape_of_inputs(module, n_ctx, width)
    except ModelError as unknown:
        said = str(unknown)
        for join in ("; ", ", or "):  # an example makes no layers, or the refusal asks for it
            said = said.replace(f"{join}give inputs=, {AN_EXAMPLE}", "")
        advice = "metric tnsim.Empirical(inputs), --metric empirical --inputs x.npy"
        runs = f". On inputs of yours it runs as it is: {advice}"
        if "--inputs x.npy" in str(refusal):  # the same advice
            runs = ""
        raise type(refusal)(
            f"{refusal}. It is not run on normal inputs either: {said}{runs}"
        ) from None
    log.info("%s is compared by its outputs, since %s", type(module).__name__, refusal)


def read_model(path: str | os.PathLike[str], n_ctx: int | None, on_inputs: bool) -> Any:
    """The model of a file; several files are refused with the verb that compares them.

    Args:
        path: Path, as for `tnsim.load`.
        n_ctx: Length of the sequences on which models with attention are compared.
        on_inputs: Whether the network runs on inputs, for which a folder of Hugging Face that is no
            model becomes the module of its library.

    Raises:
        CheckpointError, UnsupportedLayer: The path holds no model, and no such folder.
        ModelError: The path holds several models.
        MissingExtra: transformers is not installed.
    """
    from tnsim.checkpoints.load import Series, load

    try:
        read = load(path, n_ctx=n_ctx)
    except (UnsupportedLayer, CheckpointError):
        if not on_inputs or architecture_of(path) is None:
            raise
        return module_in(path)
    if isinstance(read, Series):
        raise ModelError(
            f"{os.fspath(path)} holds {len(read)} checkpoints, {read.labels[0]} to "
            f"{read.labels[-1]}: choose one, as tnsim.load(path)[-1], or compare all pairs by "
            "tnsim.pairwise(path)"
        )
    return read


def networks_of_folders(folders: Mapping[str, Path], n_ctx: int | None = None) -> dict[str, Any]:
    """The networks of folders of Hugging Face, by their labels, to be run on inputs.

    Args:
        folders: Folders from `folders_of_networks`.
        n_ctx: Length of the sequences on which models with attention are compared.

    Returns:
        Models, and networks that are none as functions, which are loaded where they run.

    Raises:
        CheckpointError, UnsupportedLayer, MissingExtra: Raised as by `read_model`.
    """
    from tnsim.checkpoints.load import deferred

    load = partial(read_model, n_ctx=n_ctx, on_inputs=True)
    return {label: deferred(path, load) for label, path in folders.items()}


def _at_length(models: Series, n_ctx: int | None, inputs: Any) -> Series:
    """Checkpoints at the length asked for, else of the inputs where the first model attends."""
    if n_ctx is None and models.reading.n_ctx is None:
        # The first file is read only where inputs have a length at all.
        n_ctx = _length_of_inputs(inputs)
        if n_ctx is not None:
            first = models[0]
            n_ctx = n_ctx if first.attends and first.n_ctx is None else None
    return models if n_ctx is None else models.at_length(n_ctx)


def _length_of_inputs(inputs: Any) -> int | None:
    """Number of positions of sequences of vectors or of tokens; None for vectors and no inputs."""
    shape = getattr(inputs, "shape", ())
    # Two axes are sequences only for token ids; floats with two axes are vectors.
    if len(shape) == 3 or (len(shape) == 2 and inputs.dtype.kind in "iu"):
        return int(shape[1])
    return None


def of_length(model: Any, n_ctx: int) -> Any:
    """A model, or each model of a combination, for sequences of another length.

    Args:
        model: A model or a combination.
        n_ctx: Number of positions.

    Returns:
        The same layers for `n_ctx` positions.

    Example:
        >>> import tnsim
        >>> of_length(tnsim.Model([tnsim.Linear([[1.0]])]), 3).n_ctx
        3
    """
    if isinstance(model, Combination):
        return Combination((c, of_length(part, n_ctx)) for c, part in terms(model))
    return Model(model.layers, n_ctx, model.origin)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Run without the progress bars of the library, one a folder."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def architecture_of(path: Any) -> str | None:
    """The class that a folder, or the base of its adapter, names for its network; None for none.

    Args:
        path: Path of anything.

    Raises:
        CheckpointError: There is a configuration, and it is damaged or too long; or an adapter
            whose base is not on this machine.

    Example:
        >>> architecture_of("no folder") is None
        True
    """
    with naming(path):
        adapter = _adapter_in(path)
        beside = Path(path) / WHOLE if adapter is None else base_of(adapter)
        named = (configuration(beside) or {}).get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    return name if isinstance(name, str) and name.isidentifier() else None


def _adapter_in(path: str | os.PathLike[str]) -> Path | None:
    """The adapter in a folder, None where there is none."""
    found = model_file(Path(path))
    return found if found is not None and is_adapter(found) else None


def _tensors_of(net: Any) -> Contents:
    """The tensors of a network by the names of its library, which may rename those of its files.

    Tied tensors have the first of their names, as in files.
    """
    own = {name for name, _ in (*net.named_parameters(), *net.named_buffers())}
    tensors = net.state_dict().items()
    return Contents.flat([stored_tensor(name, tensor) for name, tensor in tensors if name in own])


def module_in(path: str | os.PathLike[str]) -> Any:
    """The network of a folder, in evaluation mode, as a module of PyTorch.

    Args:
        path: Folder with `config.json` and weights, or of an adapter over such a folder.

    Raises:
        CheckpointError: The folder names no network of the library, or its files are not all of
            the tensors of that network and no others.
        MissingExtra: transformers is not installed.
    """
    if (adapter := _adapter_in(path)) is not None:
        from tnsim.checkpoints.modules import StatesOf  # PyTorch's reader, where it is there

        with naming(path):
            base = base_of(adapter)
            net = module_in(base.parent)
            return StatesOf(net).loaded(adapted(adapter, base, _tensors_of(net)).state)
    name = architecture_of(path)
    require("transformers", None, f"running {os.fspath(path)} on inputs")
    import transformers

    made = getattr(transformers, name or "", None)
    if not isinstance(made, type) or not hasattr(made, "from_pretrained"):
        raise CheckpointError(
            f"{os.fspath(path)}: config.json names {name!r}, which is no network of transformers "
            f"{transformers.__version__}: load it by its own code and give the module"
        )
    found = model_file(Path(path))
    with naming(path):
        if found is not None:  # damage, and pickles of more than weights, in words of ours
            contents(found)
    with naming(path), refusing(f"cannot be loaded as {name}"), _without_bars():
        loaded, told = made.from_pretrained(
            path,
            local_files_only=True,
            use_safetensors=found is None or not found.name.startswith(OLD),
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    # The library fills what a file lacks with random numbers.
    for kind, said in _FAULTS.items():
        keys = (key if isinstance(key, str) else key[0] for key in told.get(kind, ()))
        if faulty := sorted(keys):
            raise CheckpointError(
                f"{os.fspath(path)}: {len(faulty)} tensors of {name} {said}: {first_few(faulty)}; "
                "load the network by code of your own and give the module"
            )
    return loaded.eval()
