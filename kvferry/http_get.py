"""One GET to a process of this machine with a bounded time, by the standard library: the supervisor loads no HTTP client."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit

_MAX_BODY_BYTES = 16 << 20  # /metrics of a router with many workers


class NoAnswer(OSError):
    """The address refuses connections, or did not answer in time."""


def get(url: str, timeout_s: float) -> tuple[int, str]:
    """Return status and body, of which bytes that are not UTF-8 are replaced.

    A certificate is not checked: it names the host that clients know, not this machine.

    Raises:
        NoAnswer: it cannot be connected to, or is silent for ``timeout_s``.
        OSError: the answer is not HTTP, for example a closed connection.
    """
    parts = urlsplit(url)
    connection = _connection(parts.scheme, parts.hostname or "", parts.port, timeout_s)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        return response.status, response.read(_MAX_BODY_BYTES).decode(errors="replace")
    except (TimeoutError, ConnectionRefusedError) as error:
        raise NoAnswer(f"{url}: {error!r}") from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}: {error!r}") from None
    finally:
        connection.close()


def _connection(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    if scheme != "https":
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
