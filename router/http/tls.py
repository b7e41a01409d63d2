"""The TLS context of the clients' port.

Owns which files it is read from. Versions and ciphers are Python's defaults for servers, so at least TLS 1.2.
"""

from __future__ import annotations

import ssl

from core.errors import ConfigError


def server_context(cert_file: str, key_file: str) -> ssl.SSLContext | None:
    """Return the context of ``router.tls_cert`` and ``router.tls_key``; None without a certificate.

    Raises:
        ConfigError: a file cannot be read, they hold no certificate and key, or do not belong together.
    """
    if not cert_file:
        return None
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
        ) from None
    return context
