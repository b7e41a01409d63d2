import struct
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from core.errors import EncoderInputMissing, InvalidRequest
from core.model import image_file
from core.model.image_file import FORMATS, ImageSize, decode_image, read_image_size


def noise(width=60, height=44, channels=3):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8))


def encoded(image, file_format, **options):
    file = BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def png_head(width, height):
    """A PNG file whose pixels would take gigabytes, without them."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        content += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return content


@pytest.mark.parametrize("file_format", FORMATS)
def test_head_and_pixels_agree_on_the_size(file_format):
    content = encoded(noise(), file_format)
    assert read_image_size(content) == ImageSize(60, 44)
    image = decode_image(content)
    assert (image.mode, image.size) == ("RGB", (60, 44))


@pytest.mark.parametrize("file_format", FORMATS)
def test_a_cut_off_file_is_refused_at_the_head_or_with_the_pixels(file_format):
    content = encoded(noise(), file_format)
    for length in (0, 1, 10, 30, len(content) // 2, len(content) * 3 // 4):
        with pytest.raises(InvalidRequest, match="it is"):
            decode_image(content[:length])
    if file_format in ("PNG", "JPEG", "WEBP"):
        with pytest.raises(InvalidRequest, match="it is"):
            read_image_size(content[: len(content) * 3 // 4])


def test_a_head_that_promises_too_many_pixels_is_refused_before_any_is_decoded():
    for read in (read_image_size, decode_image):
        with pytest.raises(InvalidRequest, match="it has 9000 x 9000 pixels, at most 67108864 are taken"):
            read(png_head(9000, 9000))
        with pytest.raises(InvalidRequest, match="it has more than 67108864 pixels"):
            read(png_head(60000, 60000))
        with pytest.raises(InvalidRequest, match="it has 60 x 44 pixels, at most 2639 are taken"):
            read(encoded(noise(), "JPEG"), 2639)
        assert read(encoded(noise(), "JPEG"), 2640)


@pytest.mark.parametrize("size", [(20_000_000, 1), (1, 65536)])
def test_a_side_that_takes_seconds_to_resize_is_refused_however_few_pixels_there_are(size):
    width, height = size
    for read in (read_image_size, decode_image):
        with pytest.raises(InvalidRequest, match=f"it has {width} x {height} pixels, a side may have at most 65535"):
            read(png_head(width, height))


def test_an_image_as_long_as_a_side_may_be_is_read():
    content = encoded(Image.new("1", (65535, 1)), "PNG")
    assert read_image_size(content) == ImageSize(65535, 1)
    assert decode_image(content).size == (65535, 1)


@pytest.mark.parametrize("content", [b"", b"hello", b"%PDF-1.7 ", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(InvalidRequest, match="no image of a known format"):
        read_image_size(content)


@pytest.mark.parametrize("file_format", ["TIFF", "BMP"])
def test_formats_that_are_not_listed_are_refused(file_format):
    for read in (read_image_size, decode_image):
        with pytest.raises(InvalidRequest, match=r"no image of a known format \(PNG, JPEG, WEBP, GIF\)"):
            read(encoded(noise(), file_format))


@pytest.mark.parametrize("place", ["_open", "_orientation", "_opaque", "_upright"])
def test_a_lack_of_memory_is_not_the_files_fault(place, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(image_file, place, fail)
    with pytest.raises(EncoderInputMissing, match="no memory for an image at the moment"):
        decode_image(encoded(noise(), "PNG"))
    if place in ("_open", "_orientation"):
        with pytest.raises(EncoderInputMissing, match="no memory"):
            read_image_size(encoded(noise(), "PNG"))


def test_a_lack_of_memory_in_metadata_is_not_taken_for_metadata_that_is_damaged(monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(Image.Image, "getexif", fail)
    with pytest.raises(EncoderInputMissing):
        read_image_size(encoded(noise(), "PNG"))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_their_metadata_says(file_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(noise(), file_format, exif=exif)
    with Image.open(BytesIO(content)) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    image = decode_image(content)
    assert np.array_equal(np.asarray(image), np.asarray(expected))
    assert read_image_size(content) == ImageSize(*image.size)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK"])
def test_every_mode_becomes_rgb_as_in_transformers(mode):
    image = noise(channels=4).convert(mode)
    content = encoded(image, "JPEG" if mode == "CMYK" else "PNG", **({"transparency": 3} if mode == "P" else {}))
    with Image.open(BytesIO(content)) as again:
        assert again.mode == mode
        expected = convert_to_rgb(again, return_numpy=True)
    assert np.array_equal(np.asarray(decode_image(content)), expected)


def test_greyscale_of_16_bits_keeps_its_high_byte():
    values = np.linspace(0, 65535, 44 * 60).astype(np.uint16).reshape(44, 60)
    pixels = np.asarray(decode_image(encoded(Image.fromarray(values), "PNG")))
    np.testing.assert_array_equal(pixels, np.repeat(values[..., None] >> 8, 3, axis=2))


def test_only_the_transparent_value_of_16_bits_becomes_white():
    values = np.array([[0x1234, 0x1235, 0x0034]], dtype=np.uint16)
    pixels = np.asarray(decode_image(encoded(Image.fromarray(values), "PNG", transparency=0x1234)))
    np.testing.assert_array_equal(pixels[0, :, 0], [255, 0x12, 0])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_are_composed_alike_in_one_part_and_in_many(mode, monkeypatch):
    image = noise(channels=4).convert(mode) if mode != "P" else noise().quantize(200)
    content = encoded(image, "PNG", **({"transparency": bytes(range(200))} if mode == "P" else {}))
    whole = np.asarray(decode_image(content))
    monkeypatch.setattr(image_file, "_COMPOSED_PIXELS", 7 * 60 + 1)  # the last part is smaller
    np.testing.assert_array_equal(np.asarray(decode_image(content)), whole)


def test_the_first_frame_of_an_animation_is_the_image():
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "blue")]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(content).getpixel((5, 5)) == (255, 0, 0)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), file_format=st.sampled_from(FORMATS))
def test_damaged_files_are_refused_or_read_and_raise_nothing_else(data, file_format):
    content = bytearray(FILES[file_format])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(len(content), 200) - 1))] = data.draw(st.integers(0, 255))
    for read in (read_image_size, decode_image):
        with suppress(InvalidRequest):
            read(bytes(content), 10_000)


FILES = {name: encoded(noise(20, 14), name) for name in FORMATS}
