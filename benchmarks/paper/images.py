"""Labelled images of digits, drawn, scanned or read from a folder.

Without a download there are two stand-ins for street-view house numbers: the 8 x 8 scans that come
with scikit-learn (Alpaydin and Kaynak 1998), and 32 x 32 grey digits drawn from fonts (`render`).
A folder may hold the real images.

A drawn digit is in a font that matplotlib carries, at times between neighbours, turned, blurred,
light on dark or dark on light, under a slope of light and noise. A quadratic classifier is right
about as often as on the real images. Equal versions of Pillow and matplotlib give equal images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from benchmarks.paper.run import ExperimentRun
from tnsim.errors import CheckpointError, TnsimError

SIDE = 32  # pixels along an edge of a drawn image
_CANVAS = 64
"""Side of the drawing, larger than the image, so that neighbours and turned corners are cut off."""
_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmr10",
    "cmss10",
    "cmtt10",
    "cmb10",
)
Part = Literal["train", "test"]
Kind = Literal["digits", "street"]
WANTED = (
    "train_32x32.mat and test_32x32.mat of SVHN, or train.npz and test.npz with `images` "
    "(n, side, side) from 0 to 1 and `labels` (n,)"
)
_TRAINED_ON = 1437
"""Number of scikit-learn's 1797 digits to train on, four fifths."""
_RENDERED = {"train": 20_000, "test": 4_000}  # numbers of drawn images
_LUMINANCE = (0.299, 0.587, 0.114)
"""Shares of red, green and blue in the luminance (ITU-R BT.601)."""


def render(count: int, seed: int) -> tuple[Float[np.ndarray, "n pixels"], Int[np.ndarray, " n"]]:
    """Draw digits.

    Args:
        count: Number of digits, n.
        seed: Seed of the digits and of their looks.

    Returns:
        Pixels (n, 1024), float32 from 0 to 1, and digits (n,), int32.

    Example:
        >>> pixels, digits = render(2, seed=0)
        >>> pixels.shape, digits.shape
        ((2, 1024), (2,))
    """
    rng = np.random.default_rng(seed)
    digits = rng.integers(0, 10, count).astype(np.int32)
    fonts = _font_files()
    pixels = np.empty((count, SIDE * SIDE), np.float32)
    for n, digit in enumerate(digits):
        stroke = _stroke_mask(rng, fonts, int(digit))
        pixels[n] = _lit_image(rng, stroke).ravel()
    return pixels, digits


def _font_files() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [folder / f"{name}.ttf" for name in _FONTS]


def _stroke_mask(
    rng: np.random.Generator, fonts: list[Path], digit: int
) -> Float[np.ndarray, "side side"]:
    """The mask of the paint: 1 on strokes, 0 elsewhere."""
    from PIL import Image, ImageDraw, ImageFilter, ImageFont

    size = int(rng.integers(20, 34))
    font = ImageFont.truetype(str(fonts[rng.integers(len(fonts))]), size)
    image = Image.new("L", (_CANVAS, _CANVAS), 0)
    draw = ImageDraw.Draw(image)
    width = font.getlength(str(digit))
    left = _CANVAS / 2 - width / 2 + rng.uniform(-3, 3)
    top = _CANVAS / 2 - 0.62 * size + rng.uniform(-3, 3)
    draw.text((left, top), str(digit), fill=255, font=font)
    for side in (-1, 1):
        # Neighbouring digits at the edge, as house numbers have them.
        if rng.random() < 0.5:
            beside = left + side * width * rng.uniform(1.0, 1.2)
            draw.text((beside, top), str(rng.integers(10)), fill=255, font=font)
    image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    if rng.random() < 0.6:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.3)))
    # The canvas is larger than the image, so that rotation leaves no empty corners.
    margin = (_CANVAS - SIDE) // 2
    cut = image.crop((margin, margin, margin + SIDE, margin + SIDE))
    return np.asarray(cut, np.float32) / 255


def _lit_image(
    rng: np.random.Generator, stroke: Float[np.ndarray, "side side"]
) -> Float[np.ndarray, "side side"]:
    """An image with paint and ground in two shades of grey, a slope of light, and noise."""
    ground = rng.uniform(0.1, 0.9)
    contrast = rng.uniform(0.15, 0.6) * rng.choice([-1, 1])
    if not 0 <= ground + contrast <= 1:
        contrast = -contrast  # with the other sign the shade of the paint lies in [0, 1]
    across, down = rng.uniform(-0.25, 0.25, 2)
    place = np.linspace(-0.5, 0.5, SIDE)
    slope = across * place + down * place[:, None]
    noise = rng.normal(0, 0.04, stroke.shape)
    return np.clip(ground + contrast * stroke + slope + noise, 0, 1)


class Images(NamedTuple):
    """Images with their digits.

    Attributes:
        x: Pixels, row by row, from 0 to 1.
        y: Digits from 0 to 9.
    """

    x: Float[np.ndarray, "n pixels"]
    y: Int[np.ndarray, " n"]

    @property
    def side(self) -> int:
        """The number of pixels along an edge.

        Example:
            >>> Images(np.zeros((3, 64), np.float32), np.zeros(3, np.int32)).side
            8
        """
        return round(self.x.shape[1] ** 0.5)


def load(kind: Kind, part: Part, folder: Path | None = None) -> Images:
    """Images to train on, or to test with.

    Args:
        kind: Stand-in, `"digits"` or `"street"`; not used where a folder is given.
        part: Part of the data, `"train"` or `"test"`.
        folder: Folder of real data, see `WANTED`.

    Returns:
        Float32 pixels and int32 labels; the same at every call.

    Raises:
        TnsimError: When the folder does not hold the wanted files.

    Example:
        >>> load("digits", "test").x.shape
        (360, 64)
    """
    if folder is not None:
        return _of_folder(folder, part)
    if kind == "street":
        # each part has its own seed, so it is drawn without the other part
        seed = list(_RENDERED).index(part)
        return Images(*render(_RENDERED[part], seed))
    return _scanned_digits(part)


def tested_with(run: ExperimentRun[Any], pixels: int) -> Float[np.ndarray, "n pixels"]:
    """The test images of a run, of the size that its models read.

    Args:
        run: A run whose setting names `images`.
        pixels: Number of pixels that its models read.

    Returns:
        Pixels of every image.

    Raises:
        CheckpointError: When a user's models read images of another size.
        TnsimError: When the folder of data does not hold the wanted files.
    """
    x = load(run.setting.images, "test", run.data).x
    if x.shape[1] != pixels:
        raise CheckpointError(
            f"{run.checkpoints}: models of {pixels} pixels, but images of {x.shape[1]}; give the "
            "folder of their images as --data"
        )
    return x


def _scanned_digits(part: Part) -> Images:
    from sklearn.datasets import load_digits

    scans: Any = load_digits()
    # The scans come sorted by their writers.
    order = np.random.default_rng(0).permutation(len(scans.data))
    chosen = order[:_TRAINED_ON]
    if part == "test":
        chosen = order[_TRAINED_ON:]
    pixels = (scans.data[chosen] / 16).astype(np.float32)
    return Images(pixels, scans.target[chosen].astype(np.int32))


def _of_folder(folder: Path, part: Part) -> Images:
    of_svhn, plain = folder / f"{part}_32x32.mat", folder / f"{part}.npz"
    try:
        if of_svhn.exists():
            return _grey_images(of_svhn)
        with np.load(plain) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise TnsimError(
            f"{folder} cannot be read as images ({error}); wanted are {WANTED}"
        ) from None
    square = images.ndim == 3 and images.shape[1] == images.shape[2]
    if not square or labels.shape != images.shape[:1] or not 0 <= images.min() <= images.max() <= 1:
        raise TnsimError(
            f"{plain} has images {images.shape} from {images.min():g} to {images.max():g} and "
            f"labels {labels.shape}; wanted are {WANTED}"
        )
    return Images(images.reshape(len(images), -1).astype(np.float32), labels.astype(np.int32))


def _grey_images(path: Path) -> Images:
    """Images of a file of SVHN: (32, 32, 3, n) bytes, and the digit 0 written as 10."""
    from scipy.io import loadmat

    arrays: Any = loadmat(path)
    colours = np.moveaxis(arrays["X"], (-1, 2), (0, 1))
    grey = np.zeros((len(colours), 32, 32), np.float32)
    for number, share in enumerate(_LUMINANCE):  # one by one: 73,257 images take gigabytes
        grey += np.float32(share / 255) * colours[:, number]
    return Images(grey.reshape(len(grey), -1), (arrays["y"].ravel() % 10).astype(np.int32))
