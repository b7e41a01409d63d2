"""The option ``--cpu``: torch, its libraries and the compiled kernels use the instructions that an older CPU has."""

from __future__ import annotations

import argparse
import ctypes
import os

from core.testing.older_cpu import KINDS

_TORCH = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def add_cpu_choice(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument("--cpu", choices=("own", "avx2"), default="own", help="compute as on this CPU (default: %(default)s)")


def compute_as_chosen(arguments: argparse.Namespace, *libraries: ctypes.CDLL | None) -> None:
    """Carry out the choice for the rest of the process; torch must not have computed anything yet."""
    if arguments.cpu == "avx2":
        os.environ.update(_TORCH)
        for library in filter(None, libraries):
            library.kvferry_compute_as_on(KINDS.index("x86-64-v3"))
