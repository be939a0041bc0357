"""Pictures as PNG with few colors, which takes a third of the bytes."""

import io

from PIL import Image


def save(figure, file, colors: int = 64, dpi: int = 150) -> None:
    """Write a figure of Matplotlib. A page is 7 inches wide."""
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=dpi)
    picture = Image.open(whole).convert("RGB")
    picture.quantize(colors, dither=Image.Dither.NONE).save(file, optimize=True)
    print(file)
