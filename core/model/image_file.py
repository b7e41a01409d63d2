"""Image files of clients: their size without decoding them, and their pixels.

Owns the supported formats, and the errors of bad files; the caller adds which file it was. Knows nothing of models.
Torch-free: the router reads sizes, to know how many tokens an image takes; only a worker that computes embeddings decodes.
Needs Pillow (extra ``vision``), which is imported with the first image. Pillow never parses an original file, only the output
of ``core.model.image_structure``, which bounds the time that it takes.

Pillow raises exceptions of many types for a damaged file, so every exception counts as an error of the file here, unless
there is not enough memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from core.errors import ConfigError, EncoderInputMissing, InvalidRequest, KVFerryError
from core.model.image_structure import read_structure

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # as Pillow names them; of an animation, the first frame is the image
MAX_PIXELS = 64 << 20  # of one image, of three bytes each once it is decoded
MAX_SIDE = 65535  # in pixels, JPEG's own limit: Pillow's time for resizing grows with the sides, however few pixels there are
MAX_SCANNED_PIXELS = 256 << 20  # of a JPEG, times its scans: a decoder passes over all pixels in each of them
USUAL_SCANS = 16  # of a JPEG of any size: encoders write about ten, and scripts for them a few more
_MAX_EXIF_BYTES = 64 << 10  # the size of a segment of a JPEG; each of its entries may have all of its bytes copied
_COMPOSED_PIXELS = 256 << 10  # at a time: Pillow lets no other thread run while it composes two images
_JPEG_END = b"\xff\xd9"
_ORIENTATION_TAG = 0x0112
_SIDEWAYS = (5, 6, 7, 8)  # orientations that swap width and height


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Width and height in pixels, the image upright."""

    width: int
    height: int


def require_pillow() -> None:
    """Check that Pillow is installed.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError("a model that sees images needs Pillow: pip install 'kvferry[vision]'", param="model.name") from None


def read_image_size(content: bytes, max_pixels: int = MAX_PIXELS) -> ImageSize:
    """Return the size of an image from its header; no pixel is decoded.

    Damage that can be detected without decoding is refused here, the rest by ``decode_image``.

    Raises:
        InvalidRequest: it is none of ``FORMATS``, is damaged, would take too long to decode, has too many pixels, or a side
            of more than ``MAX_SIDE``.
        EncoderInputMissing: there is not enough memory for it at the moment.
    """
    with _readable():
        image = _open(content, max_pixels)
        (width, height), orientation = image.size, _orientation(image)
        if image.format == "PNG":
            image.verify()  # checksums of all chunks; decompresses nothing
    if image.format == "JPEG" and content.rfind(_JPEG_END) < 0:
        raise InvalidRequest("it is cut off")
    return ImageSize(height, width) if orientation in _SIDEWAYS else ImageSize(width, height)


def decode_image(content: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the pixels of an image: RGB, upright, transparent parts on white; of an animation the first frame.

    Raises:
        InvalidRequest: as ``read_image_size``, or its pixels cannot be decoded.
        EncoderInputMissing: there is not enough memory for them at the moment.
    """
    with _readable():
        image = _open(content, max_pixels)
        orientation = _orientation(image)
        return _upright(_opaque(image), orientation)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn a lack of memory within the block into an error of the one request concerned.

    Raises:
        EncoderInputMissing: there is not enough memory at the moment.
    """
    try:
        yield
    except MemoryError:
        raise EncoderInputMissing("there is no memory for an image at the moment") from None


def _open(content: bytes, max_pixels: int) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    structure = read_structure(content)
    try:
        image: Image.Image = Image.open(BytesIO(structure.content), formats=FORMATS)
    except UnidentifiedImageError:
        raise InvalidRequest(f"it is no image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise InvalidRequest(f"it has more than {max_pixels} pixels") from None
    width, height = image.size
    if not width or not height:
        raise InvalidRequest("it has no pixels")
    if max(width, height) > MAX_SIDE:
        raise InvalidRequest(f"it has {width} x {height} pixels, a side may have at most {MAX_SIDE}")
    if width * height > max_pixels:
        raise InvalidRequest(f"it has {width} x {height} pixels, at most {max_pixels} are taken")
    max_scans = max(USUAL_SCANS, MAX_SCANNED_PIXELS // (width * height))
    if structure.num_scans > max_scans:
        raise InvalidRequest(
            f"it has {structure.num_scans} scans of {width} x {height} pixels, at most {max_scans} are taken: "
            "save it as a JPEG that is not progressive"
        )
    return image


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation that comes before the pixels, 1 if none can be read."""
    from PIL import Image

    if any(len(image.info.get(name, "")) > _MAX_EXIF_BYTES for name in ("exif", "Raw profile type exif")):
        return 1
    try:
        # of the base class: PNG's own decodes the image to find later metadata
        return int(Image.Image.getexif(image).get(_ORIENTATION_TAG, 1))
    except MemoryError:
        raise
    except Exception:  # a photograph with damaged metadata is still a photograph
        return 1


def _opaque(image: Image.Image) -> Image.Image:
    from PIL import Image

    is_deep = image.mode.startswith("I")
    if not is_deep and "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    opaque = Image.new("RGB", image.size)
    num_rows = max(1, _COMPOSED_PIXELS // image.width)
    for top in range(0, image.height, num_rows):
        part = image.crop((0, top, image.width, min(top + num_rows, image.height)))
        layer = (_in_8_bits(part) if is_deep else part).convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        opaque.paste(Image.alpha_composite(white, layer).convert("RGB"), (0, top))
    return opaque


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Return greyscale of 16 bits as its high bytes, with an alpha channel; Pillow's own conversion clips it to white."""
    from PIL import Image

    values = np.asarray(image)
    alpha = np.where(values == image.info.get("transparency"), 0, 255)
    return Image.merge("LA", [Image.fromarray(band.astype(np.uint8)) for band in (values >> 8, alpha)])


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


@contextmanager
def _readable() -> Iterator[None]:
    try:
        with enough_memory():
            yield
    except KVFerryError:
        raise
    except Exception as error:
        raise InvalidRequest(f"it is damaged: {error}") from error
