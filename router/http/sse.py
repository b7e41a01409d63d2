"""Framing of server-sent events as OpenAI clients read them."""

from __future__ import annotations

import msgspec

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(value: object, name: str = "") -> bytes:
    """Return one event, with a name if the client reads one. JSON has no raw line breaks, so one ``data`` line is enough."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + _encoder.encode(value) + b"\n\n"
