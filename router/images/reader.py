"""Images of a conversation: from the parts that name them to the files, within limits, and what their heads say.

Owns which images a request may bring and how they are read: data URLs here, others by ``router.images.fetch``. Looks at the
head of a file only; pixels are decoded in workers. Knows nothing of tokens (``router.openai.preprocess``) and models. A
refusal names the part at fault, as ``messages[1].content[0]``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from core.config import ImagesSection
from core.errors import EncoderInputMissing, InvalidRequest
from core.model.image_file import read_image_size
from core.model.image_prompt import PromptImage
from router.images.fetch import FetchLimits, ImageFetcher
from router.images.hosts import HostRules
from router.openai.requests import ChatMessage, ImagePart

Hold = Callable[[int], None]  # counts bytes that are kept until the answer ends; raises where there are too many

_MAX_ESCAPES = 65_536  # to take them apart is Python's work, some ten milliseconds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ImageReference:
    """Where a conversation names an image, and as what."""

    place: str
    url: str


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image as the client sent it, and where, for whoever finds fault with it."""

    place: str
    image: PromptImage


def find_images(messages: Sequence[ChatMessage]) -> list[ImageReference]:
    """Return the images of a conversation in its order."""
    return [
        ImageReference(place_of(index, number), part.image_url.url)
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for number, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def place_of(message: int, part: int) -> str:
    """Return what a part of a message is called in errors."""
    return f"messages[{message}].content[{part}]"


class ImageReader:
    """Reads images for one router.

    Raises:
        ConfigError: ``router.images.reader.allowed_hosts`` holds what is no host.
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
        """Return the files, in order; those that are elsewhere are fetched side by side.

        ``hold`` is told of bytes that were not in the request's body.

        Raises:
            InvalidRequest: there are too many, they are too large, or one cannot be had or is no image; names it and says why.
            EncoderInputMissing: there is no memory for the head of one at the moment.
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
                content = await asyncio.to_thread(decode_data_url, url, self._limits.max_bytes)
            elif not self._rules:
                raise InvalidRequest("images are taken as data: URLs only, unless router.images.allowed_hosts names hosts")
            else:
                content = await self._fetcher.fetch(url)
                hold(len(content))
            size = await asyncio.to_thread(read_image_size, content, self._limits.max_pixels)
        except (InvalidRequest, EncoderInputMissing) as error:
            raise type(error)(f"{place}: the image cannot be used: {error.message}", param=place) from None
        return PlacedImage(place, PromptImage(content, size))


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Return the content of a data URL (RFC 2397); its media type is ignored, the file speaks for itself.

    Raises:
        InvalidRequest: it is malformed, or too large.
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
    """Return all results; the first error ends the others, and is raised."""
    tasks = [asyncio.ensure_future(read) for read in reads]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
