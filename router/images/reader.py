"""Reads the images of a conversation, within limits.

Owns the limits and the reading of data URLs; ``router.images.fetch`` fetches other URLs. Only a file's header is parsed here;
workers decode pixels. An error names the part at fault, such as ``messages[1].content[0]``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from core.config_router import ImagesSection
from core.errors import EncoderInputMissing, InvalidRequest
from core.model.image_file import read_image_size
from core.model.image_prompt import PromptImage
from router.images.fetch import FetchLimits, ImageFetcher
from router.images.hosts import HostRules
from router.openai.requests import ChatMessage, ImagePart
from router.threads import submit

Hold = Callable[[int], None]  # counts bytes that are kept until the answer ends; raises at the limit

_MAX_ESCAPES = 65_536  # unescaping them in Python takes about ten milliseconds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """The place of an image in a conversation, and its URL."""

    place: str
    url: str


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image as the client sent it, and its place for error messages."""

    place: str
    image: PromptImage


def find_images(messages: Sequence[ChatMessage]) -> list[ImageReference]:
    """Return the images of a conversation in order."""
    return [
        ImageReference(place_of(index, number), part.image_url.url)
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def place_of(message: int, part: int) -> str:
    """Return the name of a message part for error messages."""
    return f"messages[{message}].content[{part}]"


class RequestImageReader:
    """Reads images for one router.

    Raises:
        ConfigError: an entry of ``router.images.reader.allowed_hosts`` is invalid.
    """

    def __init__(self, limits: ImagesSection, fetcher: ImageFetcher | None = None) -> None:
        self._limits = limits
        self._rules = HostRules(limits.allowed_hosts, "router.images.allowed_hosts")
        self._fetcher = fetcher or ImageFetcher(
            self._rules,
            FetchLimits(
                max_bytes=limits.max_bytes,
                max_redirects=limits.max_redirects,
                timeout_s=limits.fetch_timeout_s,
                max_fetches=limits.max_fetches,
            ),
        )

    async def read(self, references: Sequence[ImageReference], hold: Hold) -> list[PlacedImage]:
        """Return the files in order; remote files are fetched concurrently. ``hold`` counts bytes not in the request's body.

        Raises:
            InvalidRequest: there are too many images, they are too large, or one cannot be fetched or is not an image.
            EncoderInputMissing: there is no memory for an image's header now.
            Overloaded: the turn of an image to be fetched did not come in time, or no thread can be started; names no image,
                since none is at fault.
        """
        limits = self._limits
        if len(references) > limits.max_count:
            raise InvalidRequest(
                f"the conversation has {len(references)} images, at most {limits.max_count} are taken", param="messages"
            )
        found = await _all_or_none([self._read(reference, hold) for reference in references])
        num_bytes = sum(len(placed.image.content) for placed in found)
        if num_bytes > limits.max_total_bytes:
            raise InvalidRequest(
                f"the images have {num_bytes} bytes, at most {limits.max_total_bytes} are taken together", param="messages"
            )
        return found

    async def close(self) -> None:
        """Close connections to other hosts."""
        await self._fetcher.close()

    async def _read(self, reference: ImageReference, hold: Hold) -> PlacedImage:
        place, url = reference.place, reference.url
        try:
            if url[:5].lower() == "data:":
                content = await submit(None, partial(decode_data_url, url, self._limits.max_bytes))
            elif not self._rules:
                raise InvalidRequest("images are taken as data: URLs only, unless router.images.allowed_hosts names hosts")
            else:
                content = await self._fetcher.fetch(url)
                hold(len(content))
            size = await submit(None, partial(read_image_size, content, self._limits.max_pixels))
        except (InvalidRequest, EncoderInputMissing) as error:
            raise type(error)(f"{place}: the image cannot be used: {error.message}", param=place) from None
        return PlacedImage(place, PromptImage(content, size))


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Return the content of a data URL (RFC 2397). Its media type is ignored; the file's header counts.

    Raises:
        InvalidRequest: it is malformed or too large.
    """
    head, comma, text = url.partition(",")
    if not comma:
        raise InvalidRequest("its data: URL has no comma")
    is_base64 = head.lower().endswith(";base64")
    if len(text) * 3 // 4 > max_bytes + 2 if is_base64 else len(text) > 3 * max_bytes:
        raise InvalidRequest(f"it has more than {max_bytes} bytes")
    if text.count("%") > _MAX_ESCAPES:
        raise InvalidRequest(f"its data: URL has more than {_MAX_ESCAPES} characters as %XX; send it as base64")
    try:
        content = base64.b64decode(unquote_to_bytes(text) if "%" in text else text, validate=True) if is_base64 else None
    except (binascii.Error, ValueError):
        raise InvalidRequest("its data: URL is not valid base64") from None
    content = unquote_to_bytes(text) if content is None else content
    if len(content) > max_bytes:
        raise InvalidRequest(f"it has more than {max_bytes} bytes")
    return content


async def _all_or_none(reads: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(read) for read in reads]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
