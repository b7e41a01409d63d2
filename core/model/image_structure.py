"""Reduces a file to the parts that its pixels depend on: walks its structure before Pillow parses it, and drops the rest.

Pillow parses metadata in Python, which lets no other thread run, and a decoder works through a progressive JPEG once for each
scan, however few bytes that has. So a file of a few megabytes could take minutes. The parts walked here are bounded in number
and the walk is linear in bytes, and Pillow gets only the counted parts: markers that one of the two parsers would miss have no
effect. Knows the frames of the formats, no pixels.

    PNG    chunks             the picture's own, and those that may contain its orientation
    JPEG   marker segments    tables, frame, scans; of the metadata, the color space and the orientation
    GIF    blocks             the colors, the last graphic control before the first picture, all from that picture on
    WebP   chunks             all: libwebp skips the rest in C
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from core.errors import InvalidRequest

MAX_PARTS = 4096  # chunks, segments or blocks; 8 MiB of PNG, written as libpng does, are 1024 of 8 KiB
MAX_SCANS = 64  # of a JPEG; a progressive one has about ten
MAX_TABLE_BYTES = 256 << 10  # of a JPEG, all tables of all scans together; a kibibyte or two are usual for one

_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_PICTURE = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf")
_PNG_TEXTS = (b"iTXt", b"tEXt", b"zTXt")
_PNG_TURNING = (b"XML:com.adobe.xmp\0", b"Raw profile type exif\0")  # texts that may contain an orientation
_PNG_MAX_TEXT_BYTES = 1 << 20  # of a compressed one: Pillow refuses a file with more
_PNG_MAX_TRIES = 4  # texts of one name that are unpacked to find one that is neither empty, damaged nor too large
_PNG_CHUNK = struct.Struct(">I4s")

_JPEG_MAGIC = b"\xff\xd8\xff"
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")  # no stuffed zero, fill byte or restart, which may occur in a scan
_JPEG_END, _JPEG_SCAN = 0xD9, 0xDA
_JPEG_TABLES = (*range(0xC0, 0xC8), 0xDB, 0xDC, 0xDD)  # and frames; not those of arithmetic coding, which no browser shows
_JPEG_METADATA = (*range(0xE0, 0xF0), 0xFE)
_JPEG_KEPT = ((0xE0, b"JFIF\0"), (0xE1, b"Exif\0\0"), (0xE1, b"http://ns.adobe.com/xap/1.0/\0"), (0xEE, b"Adobe"))
_JPEG_STRIDE = 1 << 20  # bytes searched at a time, between which other threads may run
_JPEG_LENGTH = struct.Struct(">H")

_GIF_MAGIC = (b"GIF87a", b"GIF89a")
_GIF_EXTENSION, _GIF_PICTURE, _GIF_CONTROL = 0x21, 0x2C, 0xF9
_GIF_CONTROL_BYTES = 8

_RIFF_CHUNK = struct.Struct("<4sI")


@dataclass(frozen=True, slots=True)
class ImageStructure:
    """The file as it is decoded, and the number of passes of its decoder over all pixels."""

    content: bytes
    num_scans: int = 1


def read_structure(content: bytes, max_parts: int = MAX_PARTS, max_scans: int = MAX_SCANS) -> ImageStructure:
    """Return the parts that the pixels of a file depend on; a file of an unknown format is returned as it is.

    Raises:
        InvalidRequest: it has too many parts or scans, or its parts are not an image.
    """
    if content.startswith(_PNG_MAGIC):
        return ImageStructure(_picture_of_png(content, max_parts))
    if content.startswith(_JPEG_MAGIC):
        return _structure_of_jpeg(content, max_parts, max_scans)
    if content.startswith(_GIF_MAGIC):
        return ImageStructure(_first_frame_of_gif(content, max_parts))
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        for number, _ in enumerate(_riff_chunks(content), 1):
            _check_parts(number, max_parts)
    return ImageStructure(content)


def _check_parts(number: int, max_parts: int) -> None:
    if number > max_parts:
        raise InvalidRequest(f"it has more than {max_parts} parts, metadata included: save it again without metadata")


def _joined(content: bytes, parts: list[memoryview]) -> bytes:
    return content if sum(map(len, parts)) == len(content) else b"".join(parts)


# ---- PNG -------------------------------------------------------------------------------------------------------------


def _picture_of_png(content: bytes, max_parts: int) -> bytes:
    view = memoryview(content)
    parts, start = [view[: len(_PNG_MAGIC)]], len(_PNG_MAGIC)
    tries = dict.fromkeys(_PNG_TURNING, _PNG_MAX_TRIES)
    number = 0
    while start + _PNG_CHUNK.size <= len(content):
        number += 1
        _check_parts(number, max_parts)
        length, kind = _PNG_CHUNK.unpack_from(content, start)
        end = start + length + 12
        if kind in _PNG_PICTURE or (kind in _PNG_TEXTS and _take_text(tries, kind, view[start + _PNG_CHUNK.size : end - 4])):
            parts.append(view[start:end])
        if kind == b"IEND":
            break
        start = end
    return _joined(content, parts)


def _take_text(tries: dict[bytes, int], kind: bytes, body: memoryview) -> bool:
    """Return True if a text is the first usable one of a needed name, which then counts as found.

    ``tries`` holds the needed names and how many more texts may be unpacked for each.
    """
    name = next((name for name in tries if body[: len(name)] == name), None)
    if name is None:
        return False
    is_usable = _is_usable(kind, bytes(body[len(name) :]))
    tries[name] -= 1
    if is_usable or not tries[name]:
        del tries[name]
    return is_usable


def _is_usable(kind: bytes, text: bytes) -> bool:
    """Return True if a text can be read and says something; ``text`` follows the name.

    zTXt: method, packed text. iTXt: flag, 0 for a text as it is, method, language, 0, translated name, 0, text.
    """
    method, packed = text[:1], text[1:]
    if kind == b"tEXt":
        return bool(text)
    if kind == b"iTXt":
        is_plain, method, parts = text[:1] == b"\0", text[1:2], text[2:].split(b"\0", 2)
        packed = parts[2] if len(parts) > 2 else b""
        if is_plain:
            return bool(packed)
    inflater = zlib.decompressobj()
    try:
        return method == b"\0" and bool(inflater.decompress(packed, _PNG_MAX_TEXT_BYTES)) and not inflater.unconsumed_tail
    except zlib.error:
        return False


# ---- JPEG ------------------------------------------------------------------------------------------------------------


def _structure_of_jpeg(content: bytes, max_parts: int, max_scans: int) -> ImageStructure:
    view = memoryview(content)
    parts = [view[:2]]
    missing = set(_JPEG_KEPT)
    num_scans = num_table_bytes = 0
    for number, (marker, start, end) in enumerate(_jpeg_segments(content), 1):
        _check_parts(number, max_parts)
        if marker in _JPEG_METADATA and not _take(missing, content, marker, start):
            continue
        num_scans += marker == _JPEG_SCAN
        num_table_bytes += end - start if marker in _JPEG_TABLES else 0
        if num_scans > max_scans:
            raise InvalidRequest(f"it has more than {max_scans} scans: save it as a JPEG that is not progressive")
        if num_table_bytes > MAX_TABLE_BYTES:
            raise InvalidRequest(f"it has more than {MAX_TABLE_BYTES} bytes of tables: save it again")
        parts.append(view[start:end])
    return ImageStructure(_joined(content, parts), num_scans)


def _take(missing: set[tuple[int, bytes]], content: bytes, marker: int, start: int) -> bool:
    """Return True if the segment of metadata is the first of a needed kind, which then counts as found."""
    for kind in missing:
        if kind[0] == marker and content.startswith(kind[1], start + 4):
            missing.remove(kind)
            return True
    return False


def _jpeg_segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the marker, start and end of each segment, a scan with its pixels; bytes between segments are skipped.

    Raises:
        InvalidRequest: a marker that libjpeg rejects, or handles slowly.
    """
    start = _next_marker(content, 2)
    while start < len(content):
        marker = content[start + 1]
        if marker == _JPEG_END:
            yield marker, start, start + 2
            return
        if marker not in _JPEG_TABLES + _JPEG_METADATA and marker != _JPEG_SCAN:
            raise InvalidRequest(f"it is damaged or no usual JPEG, marker {marker:#x} is not taken: save it again")
        if start + 4 > len(content):
            return
        end = start + 2 + max(2, *_JPEG_LENGTH.unpack_from(content, start + 2))  # a length counts its own two bytes
        following = _next_marker(content, end)
        yield marker, start, following if marker == _JPEG_SCAN else end
        start = following


def _next_marker(content: bytes, start: int) -> int:
    """Return the position of the next marker, the end of the file if there is none."""
    for begin in range(start, len(content), _JPEG_STRIDE):
        found = _JPEG_MARKER.search(content, begin, begin + _JPEG_STRIDE + 1)  # a marker may straddle the border
        if found is not None:
            return found.start()
    return len(content)


# ---- GIF and WebP ----------------------------------------------------------------------------------------------------


def _first_frame_of_gif(content: bytes, max_parts: int) -> bytes:
    view = memoryview(content)
    has_colours = len(content) > 10 and content[10] & 0x80
    head = control = view[: 13 + (3 << (content[10] & 7) + 1 if has_colours else 0)]
    parts = [head]
    for number, (kind, start, end) in enumerate(_gif_parts(content, len(head)), 1):
        _check_parts(number, max_parts)
        if kind == _GIF_CONTROL:
            control = view[start:end]
        elif kind == _GIF_PICTURE:
            parts += [control] if control is not head else []
            return _joined(content, [*parts, view[start:]])
    raise InvalidRequest("it is damaged: it has no picture")


def _gif_parts(content: bytes, start: int) -> Iterator[tuple[int | None, int, int]]:
    """Yield the parts before the first picture, and its position: graphic controls, and each piece of all others."""
    while start + 1 < len(content):
        kind, end = content[start], start + 1
        if kind == _GIF_PICTURE:
            yield _GIF_PICTURE, start, end
            return
        if kind == _GIF_EXTENSION:
            end += 1
            while end < len(content) and content[end]:
                yield None, end, end
                end += content[end] + 1
            end += 1
            is_control = content[start + 1] == _GIF_CONTROL and end - start == _GIF_CONTROL_BYTES
            yield _GIF_CONTROL if is_control else None, start, end
        else:
            yield None, start, end
        start = end


def _riff_chunks(content: bytes) -> Iterator[int]:
    """Yield the start of each chunk."""
    start = 12
    while start + _RIFF_CHUNK.size <= len(content):
        yield start
        _, length = _RIFF_CHUNK.unpack_from(content, start)
        start += _RIFF_CHUNK.size + length + length % 2
