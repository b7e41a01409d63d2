"""Server-sent events as OpenAI clients read them. Framing only; knows nothing of what is in an event."""

from __future__ import annotations

import msgspec

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(value: object) -> bytes:
    """Return one event. JSON holds no raw line break, so one ``data`` line is enough."""
    return b"data: " + _encoder.encode(value) + b"\n\n"
