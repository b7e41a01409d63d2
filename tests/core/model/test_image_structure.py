"""The parts of a file that reach Pillow: hostile files are refused by counting, and dropped parts never change pixels."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import MAX_TEXT_CHUNK

from core.errors import InvalidRequest
from core.model import image_file, image_structure
from core.model.image_file import decode_image, read_image_size
from core.model.image_structure import MAX_PARTS, MAX_SCANS, ImageStructure, read_structure

XMP_BEFORE = b"XML:com.adobe.xmp\0\1\0\0\0"  # of a compressed text
TURNING = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
READS = (read_image_size, decode_image)


def noise(width=60, height=44):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(file_format, image=None, **options):
    file = BytesIO()
    (image or noise()).save(file, file_format, **options)
    return file.getvalue()


def chunk(kind, body=b""):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def segment(marker, body=b""):
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def with_png_chunks(chunks, *, behind_pixels=False):
    content = encoded("PNG")
    place = len(content) - 12 if behind_pixels else 33
    return content[:place] + chunks + content[place:]


def with_jpeg_segments(segments, **options):
    content = encoded("JPEG", **options)
    return content[:2] + segments + content[2:]


def with_gif_blocks(blocks):
    content = encoded("GIF", noise().quantize(256))
    place = 13 + (3 << (content[10] & 7) + 1)
    return content[:place] + blocks + content[place:]


def with_riff_chunks(chunks):
    content = encoded("WEBP", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0\0\0\0\0") + chunks
    return content[:4] + struct.pack("<I", len(content) - 8) + content[8:]


def with_scans(num_more):
    """A progressive JPEG whose last scan, a few bytes, is there so many times more."""
    content = encoded("JPEG", Image.new("L", (60, 44), 128), progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * num_more + content[-2:]


MANY = MAX_PARTS + 1
HOSTILE = {
    "PNG chunks": with_png_chunks(chunk(b"teSt") * MANY),
    "PNG chunks behind the pixels": with_png_chunks(chunk(b"teSt") * MANY, behind_pixels=True),
    "JPEG comments": with_jpeg_segments(segment(0xFE) * MANY),
    "GIF comments": with_gif_blocks(b"\x21\xfe\x01a\0" * MANY),
    "GIF extensions without a block": with_gif_blocks(b"\x21\x01\0" * MANY),
    "GIF blocks of a comment": with_gif_blocks(b"\x21\xfe" + b"\x01a" * MANY + b"\0"),
    "GIF zeros between blocks": with_gif_blocks(b"\0" * MANY),
    "WebP chunks": with_riff_chunks(struct.pack("<4sI", b"junk", 0) * MANY),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_too_many_parts_is_refused_before_pillow_sees_it(name, read, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("Pillow has been given it"))
    with pytest.raises(InvalidRequest, match=r"it has more than 4096 parts.*save it again without metadata"):
        read(HOSTILE[name])


@pytest.mark.parametrize("read", READS)
def test_a_jpeg_of_too_many_scans_is_refused_before_pillow_sees_it(read, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("Pillow has been given it"))
    with pytest.raises(InvalidRequest, match="it has more than 64 scans: save it as a JPEG that is not progressive"):
        read(with_scans(MAX_SCANS))


def test_scans_are_counted():
    assert read_structure(encoded("JPEG")).num_scans == 1
    usual = read_structure(encoded("JPEG", progressive=True)).num_scans
    assert 2 < usual <= 12
    assert read_structure(with_scans(7)).num_scans == read_structure(with_scans(0)).num_scans + 7
    assert read_structure(encoded("PNG")).num_scans == 1
    limit = read_structure(with_scans(7)).num_scans
    assert read_structure(with_scans(7), max_scans=limit).num_scans == limit
    with pytest.raises(InvalidRequest, match=f"more than {limit - 1} scans"):
        read_structure(with_scans(7), max_scans=limit - 1)


@pytest.mark.parametrize("read", READS)
def test_scans_times_pixels_are_bounded(read, monkeypatch):
    content = with_scans(20)
    num_scans = read_structure(content).num_scans
    monkeypatch.setattr(image_file, "MAX_SCANNED_PIXELS", 60 * 44 * num_scans)
    read(content)
    monkeypatch.setattr(image_file, "MAX_SCANNED_PIXELS", 60 * 44 * num_scans - 1)
    said = f"it has {num_scans} scans of 60 x 44 pixels, at most {num_scans - 1} are taken: save it as a JPEG that is not"
    with pytest.raises(InvalidRequest, match=said):
        read(content)


def test_as_many_scans_as_encoders_write_are_read_however_large_the_image_is(monkeypatch):
    monkeypatch.setattr(image_file, "MAX_SCANNED_PIXELS", 0)
    content = encoded("JPEG", progressive=True)
    num_scans = read_structure(content).num_scans
    assert read_image_size(content)
    assert read_image_size(with_scans(16 - read_structure(with_scans(0)).num_scans))
    monkeypatch.setattr(image_file, "USUAL_SCANS", num_scans - 1)
    with pytest.raises(InvalidRequest, match=f"it has {num_scans} scans"):
        read_image_size(content)


def test_scans_hidden_from_one_reader_count_or_are_not_there_for_the_other():
    content = with_scans(0)
    last = content[content.rindex(b"\xff\xda") : -2]
    behind_restarts = content[:-2] + b"\xff\xd0\xff\x00\xff\xff" + last + content[-2:]
    assert read_structure(behind_restarts).num_scans == read_structure(content).num_scans + 1
    in_comment = content[:2] + segment(0xFE, last * 99) + content[2:]
    assert read_structure(in_comment) == ImageStructure(content, read_structure(content).num_scans)
    behind_the_end = content + last * 99
    assert read_structure(behind_the_end) == ImageStructure(content, read_structure(content).num_scans)


@pytest.mark.parametrize("marker", [0xC8, 0xC9, 0xCC, 0xD8, 0xF0, 0xFD])
def test_a_marker_at_which_decoders_give_up_or_are_slow_is_refused(marker):
    with pytest.raises(InvalidRequest, match=f"marker {marker:#x} is not taken: save it again"):
        read_structure(with_jpeg_segments(segment(marker)))


@pytest.mark.parametrize("stride", [1, 2, 7])
def test_markers_are_found_across_the_strides_of_the_search(stride, monkeypatch):
    content = with_jpeg_segments(segment(0xFE, b"hello") * 3, progressive=True)
    expected = read_structure(content)
    monkeypatch.setattr(image_structure, "_JPEG_STRIDE", stride)
    assert read_structure(content) == expected


def test_tables_of_a_jpeg_are_bounded(monkeypatch):
    table = segment(0xDB, (b"\0" + b"\1" * 64) * 1000)
    with pytest.raises(InvalidRequest, match="more than 262144 bytes of tables"):
        read_image_size(with_jpeg_segments(table * 5))
    assert read_image_size(with_jpeg_segments(table))


def test_metadata_that_pillow_would_parse_in_python_is_left_out():
    jpeg = encoded("JPEG")
    profile = segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000))
    resources = segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5000)
    assert read_structure(with_jpeg_segments((profile + resources) * 9 + segment(0xFE, b"hello"))).content == jpeg
    assert read_structure(jpeg[:2] + bytes(100) + jpeg[2:]).content == jpeg[:2] + bytes(100) + jpeg[2:]  # no JPEG to Pillow
    assert read_structure(jpeg[:20] + b"junk" + jpeg[20:]).content == jpeg
    assert read_structure(with_png_chunks(chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(9999))))).content == encoded("PNG")
    assert read_structure(with_png_chunks(chunk(b"tEXt", b"Comment\0hello") * 99)).content == encoded("PNG")
    assert read_structure(with_gif_blocks(b"\x21\xfe\x05hello\0" * 99 + b"\0")).content == with_gif_blocks(b"")


def test_of_repeated_metadata_the_first_is_kept():
    exif = Image.Exif()
    exif[0x0112] = 6
    content = with_jpeg_segments(segment(0xE1, exif.tobytes()) + segment(0xE1, b"Exif\0\0" + bytes(60_000)) * 50)
    assert read_structure(content).content == with_jpeg_segments(segment(0xE1, exif.tobytes()))
    assert read_image_size(content) == image_file.ImageSize(44, 60)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}, {"mode": "CMYK"}, {"mode": "L"}])
def test_pixels_of_a_jpeg_do_not_change_by_what_is_left_out(options):
    options = dict(options)
    content = encoded("JPEG", noise().convert(options.pop("mode", "RGB")), icc_profile=b"p" * 99_000, comment=b"c", **options)
    kept = read_structure(content).content
    assert len(kept) < len(content) - 99_000
    expected = np.asarray(Image.open(BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(Image.open(BytesIO(kept)).convert("RGB")), expected)
    np.testing.assert_array_equal(np.asarray(decode_image(content)), expected)


@pytest.mark.parametrize("file_format", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_does_not_change_by_what_is_left_out(file_format):
    frames = [noise().rotate(angle).quantize(60).convert("RGB") for angle in (0, 180)]
    content = encoded(file_format, frames[0], save_all=True, append_images=frames[1:], duration=50, loop=0)
    expected = np.asarray(Image.open(BytesIO(content)).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(decode_image(content)), expected)


def test_a_transparent_gif_stays_transparent():
    palette = noise().quantize(60)
    content = encoded("GIF", palette, transparency=palette.getpixel((0, 0)), comment=b"hello", disposal=2)
    assert len(read_structure(content).content) < len(content)
    assert decode_image(content).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_xmp_says(file_format):
    if file_format == "PNG":
        content = with_png_chunks(chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + TURNING))
    else:
        content = encoded(file_format, xmp=TURNING)
    assert read_image_size(content) == image_file.ImageSize(44, 60)
    assert decode_image(content).size == (44, 60)


def test_metadata_that_is_too_large_to_parse_turns_nothing(monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded("PNG", exif=exif)
    assert read_image_size(content) == image_file.ImageSize(44, 60)
    monkeypatch.setattr(image_file, "_MAX_EXIF_BYTES", 10)
    assert read_image_size(content) == image_file.ImageSize(60, 44)


@pytest.mark.parametrize(
    ("kind", "before"), [(b"iTXt", XMP_BEFORE), (b"zTXt", b"XML:com.adobe.xmp\0\0"), (b"zTXt", b"Raw profile type exif\0\0")]
)
def test_a_compressed_text_too_large_for_pillow_is_left_out(kind, before):
    """The text is metadata: without it the image is what it was."""
    for num_bytes, is_kept in ((MAX_TEXT_CHUNK, True), (MAX_TEXT_CHUNK + 1, False)):
        content = with_png_chunks(chunk(kind, before + zlib.compress(bytes(num_bytes))))
        assert decode_image(content).size == decode_image(encoded("PNG")).size
        assert (len(read_structure(content).content) > len(encoded("PNG"))) == is_kept


@pytest.mark.parametrize("text", [b"", b"\0", b"\1\0", b"\1\0en", b"\1\0\0\0", b"\1\0\0\0damaged", b"\0\0\0"])
def test_a_text_that_cannot_be_read_turns_nothing(text):
    content = with_png_chunks(chunk(b"iTXt", b"XML:com.adobe.xmp\0" + text))
    assert decode_image(content).size == decode_image(encoded("PNG")).size


def test_only_the_first_text_of_a_kind_is_read():
    first = chunk(b"iTXt", XMP_BEFORE + zlib.compress(TURNING))
    content = with_png_chunks(first + chunk(b"iTXt", XMP_BEFORE + zlib.compress(bytes(MAX_TEXT_CHUNK))) * 99)
    assert read_structure(content).content == with_png_chunks(first)
    width, height = decode_image(encoded("PNG")).size
    assert decode_image(content).size == (height, width)


TOO_LARGE = chunk(b"iTXt", XMP_BEFORE + zlib.compress(bytes(MAX_TEXT_CHUNK + 1)))


@pytest.mark.parametrize(
    "useless",
    [
        TOO_LARGE,
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0"),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0"),
        chunk(b"iTXt", XMP_BEFORE + b"damaged"),
        chunk(b"iTXt", XMP_BEFORE + zlib.compress(b"")),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\1\0\0" + zlib.compress(TURNING)),
        chunk(b"tEXt", b"XML:com.adobe.xmp\0"),
        chunk(b"zTXt", b"XML:com.adobe.xmp\0\0"),
    ],
    ids=["too large", "cut off", "empty", "damaged", "nothing packed", "packed otherwise", "empty tEXt", "empty zTXt"],
)
def test_a_text_after_one_that_cannot_be_used_is_read(useless):
    turning = chunk(b"iTXt", XMP_BEFORE + zlib.compress(TURNING))
    assert read_structure(with_png_chunks(useless + turning)).content == with_png_chunks(turning)
    assert read_image_size(with_png_chunks(useless + turning)) == image_file.ImageSize(44, 60)


def test_only_so_many_texts_of_a_kind_are_unpacked():
    turning = chunk(b"iTXt", XMP_BEFORE + zlib.compress(TURNING))
    assert read_image_size(with_png_chunks(TOO_LARGE * 3 + turning)) == image_file.ImageSize(44, 60)
    assert read_structure(with_png_chunks(TOO_LARGE * 4 + turning)).content == encoded("PNG")


@pytest.mark.parametrize("file_format", ["GIF", "JPEG", "PNG", "WEBP"])
def test_cut_off_files_are_walked_to_their_end(file_format):
    content = encoded(file_format, noise(9, 7))
    for length in range(len(content)):
        try:
            structure = read_structure(content[:length])
        except InvalidRequest as error:
            assert "it is damaged" in error.message  # noqa: PT017
        else:
            assert content.startswith(structure.content[:2])


def test_a_file_of_no_known_format_is_passed_on():
    assert read_structure(b"hello") == ImageStructure(b"hello")
    assert image_structure.MAX_PARTS == 4096
