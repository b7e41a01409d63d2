"""The element type of weights, keys and values that ``model.dtype = auto`` stands for. Imports no torch."""

from __future__ import annotations

from core.cpu_features import has_bfloat16_instructions


def resolve_dtype_name(setting: str, checkpoint: str, device_type: str) -> str:
    """Return torch's name of the element type, for a checkpoint whose weights are stored as ``checkpoint``.

    ``auto`` is bfloat16 on a GPU. On a CPU it is bfloat16 if the checkpoint is and the CPU has the instructions, else float32.
    """
    if setting != "auto":
        return setting
    if device_type != "cpu" or (checkpoint == "bfloat16" and has_bfloat16_instructions()):
        return "bfloat16"
    return "float32"
