"""What the commands that talk to a server are told about it: its address, and the key that they send.

The HTTP client is imported when one of them runs, because every process of a cluster imports the command line.
"""

from __future__ import annotations

from core.config_checks import http_problem
from core.errors import ConfigError


def check_address(url: str, flag: str) -> None:
    """Check the address of a server before anything is sent there.

    Raises:
        ConfigError: it is not http or https, has no host, or a port that is none; names the flag.
    """
    import httpx

    problem = http_problem(url)
    try:
        _ = httpx.URL(url).host  # it decodes the name
    except (httpx.InvalidURL, UnicodeError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(f"{flag} = {url!r}: {problem}; give http://HOST:PORT", param=flag.lstrip("-"))


def first_key(keys: str) -> str:
    """Return the first of the API keys of a router, which commas separate; "" if there is none."""
    return next((key.strip() for key in keys.split(",") if key.strip()), "")


def bearer(key: str) -> dict[bytes, bytes]:
    """Return the header with an API key, in UTF-8, or as the shell has given it; none without a key."""
    return {b"Authorization": b"Bearer " + key.encode(errors="surrogateescape")} if key else {}
