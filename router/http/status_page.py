"""The page of ``/status``: one document without external assets, which reads the router's reports every two seconds.

Owns how the files of ``status_assets`` become one document, and the policy under which browsers run it. Its scripts insert
values as text, never as markup, because names come from workers and clients.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

_ASSETS = resources.files("router.http") / "status_assets"
_SCRIPTS = ("dom.js", "charts.js", "cluster.js", "requests.js", "page.js")  # one scope, in this order


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash_of(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


STYLE = "\n" + _read("page.css")
SCRIPT = '\n"use strict";\n(() => {\n' + "\n".join(_read(name) for name in _SCRIPTS) + "})();\n"
PAGE = _read("page.html").replace("{{style}}", STYLE).replace("{{script}}", SCRIPT)

# Only this script, this style and the router's own reports may load, under any name of a worker or a request.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; connect-src 'self'; style-src 'sha256-{_hash_of(STYLE)}'; script-src 'sha256-{_hash_of(SCRIPT)}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
