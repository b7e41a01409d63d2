"""Field types with their ranges, for everything that arrives from another process.

The decoder checks them while it decodes, so a message that exists has sane values. Python code that builds a message is not
checked here: a wrong value there is our own bug.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

INT32_MAX = 2**31 - 1
MAX_NUM_FEATURES = 256  # of one request
MAX_MILLISECONDS = 10**12
MAX_MEDIA_BYTES = 20 << 20  # one image file

Name = Annotated[str, Meta(min_length=1, max_length=512)]  # ids of requests, engines, transfers
Text = Annotated[str, Meta(max_length=8192)]  # addresses, reasons
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]
ChoiceIndex = Annotated[int, Meta(ge=0, le=1023)]
NumChoices = Annotated[int, Meta(ge=1, le=1024)]
BlockId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Unsigned64 = Annotated[int, Meta(ge=0)]  # generations and incarnations; msgpack itself ends at 2**64 - 1
BlockHashBytes = Annotated[bytes, Meta(min_length=16, max_length=16)]
ChainBytes = Annotated[bytes, Meta(min_length=16, max_length=3 << 20)]  # block hashes, one after another
Milliseconds = Annotated[float, Meta(ge=0, le=MAX_MILLISECONDS)]
WholeMilliseconds = Annotated[int, Meta(ge=0, le=MAX_MILLISECONDS)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
HttpStatus = Annotated[int, Meta(ge=400, le=599)]  # of an error
AnyHttpStatus = Annotated[int, Meta(ge=100, le=599)]
MediaIdentifier = Annotated[bytes, Meta(min_length=16, max_length=16)]
MediaIndex = Annotated[int, Meta(ge=0, le=INT32_MAX)]
EmbeddingCount = Annotated[int, Meta(ge=1, le=2**20)]
Media = Annotated[bytes, Meta(max_length=MAX_MEDIA_BYTES)]
Payload = Annotated[bytes, Meta(max_length=64 << 10)]  # what one connector tells another of its kind
