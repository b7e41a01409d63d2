"""The minor version of the vLLM that runs this. With another one than the supported ones, this module cannot be imported.

``connectors.vllm.connector`` imports it before any internals of vLLM: where those differ, the user is told of the version, and
not of a name that is missing.
"""

from __future__ import annotations

import vllm

from connectors.vllm.engine import check_version

MINOR = check_version(vllm.__version__)
