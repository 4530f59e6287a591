"""The text that a language model learns. In: a run. Out: token ids, kept beside its checkpoints.

By default the text is the source of Python's standard library, which is wherever Python is. It
differs from version to version, so a digest says which text it was.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from tnsim.errors import ModelError
from tnsim.files import replacing
from tnsim.reproduce.language.byte_pairs import END, encode, learn, words_of
from tnsim.reproduce.language.setting import Setting
from tnsim.reproduce.run import Run

FILE = "text.npz"
LEFT_OUT = {
    "__pycache__",
    "distutils",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}
"""Folders of the standard library: tests, programs, tables, and what not every Python has."""
BETWEEN_DOCUMENTS = b"<|endoftext|>"
"""Parts documents within a file, as collections of stories have it."""
_ONE_IN = 20  # documents are held out
_LONGEST = 2**16  # bytes of a document; longer ones are several


@dataclass(frozen=True)
class Text:
    """A text as token ids.

    Args:
        training: Documents one after another, END before each.
        held_out: Others.
        digest: Of the bytes of all documents, 12 hexadecimal digits.
        documents: How many there are.
    """

    training: Int[np.ndarray, " tokens"]
    held_out: Int[np.ndarray, " tokens"]
    digest: str
    documents: int


def text_of(run: Run[Setting]) -> Text:
    """The text of a run: read where it was kept, else made and kept.

    Args:
        run: Whose `data` is a folder of `.txt` files in UTF-8, or None for the standard library.

    Returns:
        Training and held-out tokens.

    Raises:
        ModelError: There is not enough text, or checkpoints of somebody come without their text.
    """
    path = run.checkpoints / FILE
    if not path.exists():
        if run.given is not None:
            raise ModelError(
                f"{path}: missing; token ids belong to their model, so checkpoints come with the "
                "text they are compared on, as integer arrays `training` and `held_out`"
            )
        _write(made(documents(run.data), run.setting.vocabulary), path)
    with np.load(path, allow_pickle=False) as stored:
        training, held_out = stored["training"], stored["held_out"]
        digest = str(stored["digest"]) if "digest" in stored else "unknown"
        count = int(stored["documents"]) if "documents" in stored else 0
    return Text(training.astype(np.int32), held_out.astype(np.int32), digest, count)


def documents(folder: Path | None) -> list[bytes]:
    """Texts to learn from, in the order of their names.

    Args:
        folder: With `.txt` files, or None for the standard library.

    Returns:
        Documents of at most 64 KiB each.

    Raises:
        ModelError: The folder has no such file.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    pattern = "*.txt" if folder else "*.py"
    paths = sorted(root.rglob(pattern), key=lambda path: path.relative_to(root).as_posix())
    if folder is None:
        paths = [path for path in paths if not LEFT_OUT & set(path.relative_to(root).parts)]
    found = []
    for path in paths:
        for document in path.read_bytes().split(BETWEEN_DOCUMENTS):
            found += _cut(document.strip(b"\r\n").replace(b"\r\n", b"\n"))
    if not found:
        raise ModelError(f"{root}: there is no text; give a folder of .txt files")
    return found


def made(texts: Sequence[bytes], vocabulary: int) -> Text:
    """Documents as tokens, one in twenty of them held out.

    Args:
        texts: The documents.
        vocabulary: Tokens, learned from those that are not held out.

    Returns:
        The text.

    Raises:
        ModelError: There are too few documents, or too few different words.

    Example:
        >>> text = made([b"one two %d" % n for n in range(100)], 20)
        >>> text.documents, int(text.training[0]), len(text.held_out) > 0
        (100, 0, True)
    """
    held_out = [_is_held_out(text) for text in texts]
    if all(held_out) or not any(held_out):
        raise ModelError(
            f"too few documents to hold out one in {_ONE_IN}: {len(texts)}; every file is one, "
            f"and what {BETWEEN_DOCUMENTS.decode()} parts within a file"
        )
    words = [words_of(text) for text in texts]
    counts: Counter[bytes] = Counter()
    for own, held in zip(words, held_out, strict=True):
        if not held:
            counts.update(own)
    coder = learn(counts, vocabulary)
    different = sorted({word for own in words for word in own})
    tokens = dict(zip(different, encode(coder, different), strict=True))
    streams: dict[bool, list[np.ndarray]] = {False: [], True: []}
    for own, held in zip(words, held_out, strict=True):
        streams[held].append(np.array([END]))
        streams[held] += [tokens[word] for word in own]
    digest = hashlib.sha256(BETWEEN_DOCUMENTS.join(texts)).hexdigest()[:12]
    training, kept = np.concatenate(streams[False]), np.concatenate(streams[True])
    return Text(training.astype(np.int32), kept.astype(np.int32), digest, len(texts))


def _cut(document: bytes) -> Iterable[bytes]:
    """A document in pieces that are not too long, none of them empty."""
    return [document[start : start + _LONGEST] for start in range(0, len(document), _LONGEST)]


def _is_held_out(text: bytes) -> bool:
    """Whether it is one of twenty, by what it says alone."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % _ONE_IN == 0


def _write(text: Text, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(
            file,
            training=text.training.astype(np.uint16),
            held_out=text.held_out.astype(np.uint16),
            digest=np.array(text.digest),
            documents=np.array(text.documents),
        )
