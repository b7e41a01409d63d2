"""How setuptools builds the libraries of ``core.compiled``: each says which sources it was built from.

pyproject.toml names the class. Not part of any package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent


class BuildLibraries(build_ext):
    """Adds a C file to each library that defines the digest of the others."""

    def build_extension(self, ext: Extension) -> None:
        """See ``build_ext``. A library is built again whenever its digest differs, whatever the times of its files."""
        sources = list(ext.sources)
        ext.sources = [*sources, str(self._write_digest(ext.name, ROOT / sources[0]))]
        try:
            super().build_extension(ext)
        finally:
            ext.sources = sources  # they are what a source distribution holds

    def _write_digest(self, name: str, source: Path) -> Path:
        sys.path.insert(0, str(ROOT))
        from core.compiled import DIGEST_SYMBOL, sources_digest

        sys.path.remove(str(ROOT))
        file = Path(self.build_temp, f"{name}.digest.c")
        text = f'const char {DIGEST_SYMBOL}[] = "{sources_digest(source)}";\n'
        if not file.is_file() or file.read_text() != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return file
