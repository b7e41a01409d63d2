"""What a process has loaded, out of the garbage collector's sight.

A full collection stops every thread while it walks all modules, classes and weights' wrappers that a worker will keep for its
life; the end of a NIXL agent is one each time. Called once by a worker, behind the model, and by the router.
"""

from __future__ import annotations

import gc


def freeze_loaded_objects() -> None:
    """Collect once more, then never look again at what is left. Takes as long as a full collection. Source: ``gc.freeze``."""
    gc.collect()
    gc.freeze()
