"""The TLS context of the clients' port, which follows its files.

Owns which files it is read from, and when they are read again: at the first handshake after they have changed, or once they
may have become readable. Versions and ciphers are Python's defaults for servers, so at least TLS 1.2.
"""

from __future__ import annotations

import logging
import math
import os
import ssl
import time
from collections.abc import Callable

from core.errors import ConfigError
from core.log import event

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # so long handshakes pass before files that could not be read are tried again, if they look the same
_Clock = Callable[[], float]


def server_context(cert_file: str, key_file: str, clock: _Clock = time.monotonic) -> ssl.SSLContext | None:
    """Return the context of ``router.tls_cert`` and ``router.tls_key``; None without a certificate.

    New connections get what the files hold then. Files that cannot be loaded any more leave the last certificate in use.

    Raises:
        ConfigError: a file cannot be read, they hold no certificate and key, or do not belong together.
    """
    return _RenewedCertificate(cert_file, key_file, clock).context if cert_file else None


class _RenewedCertificate:
    """The context of two files, whose callback gives each handshake the certificate that they hold by then."""

    def __init__(self, cert_file: str, key_file: str, clock: _Clock) -> None:
        self._files = (cert_file, key_file)
        self._clock = clock
        self._retry_at = math.inf
        self._refusal = ""  # the last one, which is logged once
        self._state = self._state_of_files()  # before they are read: a change during that is read by the next handshake
        self.context = self._newest = _load(cert_file, key_file)
        self.context.sni_callback = self._on_hello  # called for clients without SNI, too

    def _on_hello(self, connection: ssl.SSLObject, _host: str | None, _context: ssl.SSLContext) -> None:
        state = self._state_of_files()
        if state != self._state or self._clock() >= self._retry_at:
            self._state, self._retry_at = state, math.inf
            self._renew()
        connection.context = self._newest

    def _renew(self) -> None:
        try:
            # Into a new context: of a half-written pair, the old one would take the certificate and lack its key.
            self._newest = _load(*self._files)
        except ConfigError as error:
            if not isinstance(error.__cause__, ssl.SSLError):  # not what the files hold: descriptors or a permission may lack
                self._retry_at = self._clock() + RETRY_S
            if error.message != self._refusal:
                self._refusal = error.message
                logger.error(event("certificate_refused", error=error.message))
            return
        self._refusal = ""
        logger.info(event("certificate_renewed", file=self._files[0]))

    def _state_of_files(self) -> list[tuple[int, int, int, int] | None]:
        """Return what differs once the files have been replaced or written, or have another owner or mode."""
        states: list[tuple[int, int, int, int] | None] = []
        for path in self._files:
            try:
                found = os.stat(path)
                states.append((found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size))
            except OSError:
                states.append(None)
        return states


def _load(cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # An empty password: a key that needs one is an error instead of a prompt on the terminal.
        context.load_cert_chain(cert_file, key_file, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"router.tls_cert = {cert_file!r} and router.tls_key = {key_file!r} cannot be loaded: {reason}",
            param="router.tls_cert",
        ) from error
    return context
