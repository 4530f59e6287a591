"""Digits as on house numbers, drawn. In: a number, a seed. Out: 32 x 32 grey images and labels.

A digit in one of the fonts that matplotlib carries, at times between neighbours, turned, blurred,
light on dark or dark on light, under a slope of light and noise. A quadratic classifier gets
about as many right as of the real ones. Equal versions of Pillow and matplotlib give equal images.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

SIDE = 32
_CANVAS = 64
"""Larger than the image, so that neighbours and turned corners are cut off, not missing."""
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


def render(count: int, seed: int) -> tuple[Float[np.ndarray, "n pixels"], Int[np.ndarray, " n"]]:
    """Draw digits.

    Args:
        count: How many, n.
        seed: Of everything about them.

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
        stroke = _stroke(rng, fonts, int(digit))
        pixels[n] = _lit(rng, stroke).ravel()
    return pixels, digits


def _font_files() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return [folder / f"{name}.ttf" for name in _FONTS]


def _stroke(
    rng: np.random.Generator, fonts: list[Path], digit: int
) -> Float[np.ndarray, "side side"]:
    """Where the paint is: 1 on strokes, 0 beside them."""
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
        if rng.random() < 0.5:
            beside = left + side * width * rng.uniform(1.0, 1.2)
            draw.text((beside, top), str(rng.integers(10)), fill=255, font=font)
    image = image.rotate(rng.uniform(-12, 12), Image.Resampling.BILINEAR)
    if rng.random() < 0.6:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 1.3)))
    margin = (_CANVAS - SIDE) // 2
    cut = image.crop((margin, margin, margin + SIDE, margin + SIDE))
    return np.asarray(cut, np.float32) / 255


def _lit(
    rng: np.random.Generator, stroke: Float[np.ndarray, "side side"]
) -> Float[np.ndarray, "side side"]:
    """Paint and ground in two shades of grey, a slope of light, and noise."""
    ground = rng.uniform(0.1, 0.9)
    contrast = rng.uniform(0.15, 0.6) * rng.choice([-1, 1])
    if not 0 <= ground + contrast <= 1:
        contrast = -contrast  # the other way round there is room
    across, down = rng.uniform(-0.25, 0.25, 2)
    place = np.linspace(-0.5, 0.5, SIDE)
    slope = across * place + down * place[:, None]
    noise = rng.normal(0, 0.04, stroke.shape)
    return np.clip(ground + contrast * stroke + slope + noise, 0, 1)
