"""What settings of a model's numbers mean on a device: ``model.dtype = auto``, ``model.quantization``. Imports no torch."""

from __future__ import annotations

from core.config_workers import ModelSection
from core.cpu_features import has_bfloat16_instructions
from core.errors import ConfigError


def resolve_dtype_name(setting: str, checkpoint: str, device_type: str) -> str:
    """Return torch's name of the element type, for a checkpoint whose weights are stored as ``checkpoint``.

    ``auto`` is bfloat16 on a GPU. On a CPU it is bfloat16 if the checkpoint is and the CPU has the instructions, else float32.
    """
    if setting != "auto":
        return setting
    if device_type != "cpu" or (checkpoint == "bfloat16" and has_bfloat16_instructions()):
        return "bfloat16"
    return "float32"


def check_quantization(section: ModelSection, device_type: str) -> None:
    """Check that a worker that computes text on this type of device can compute with the weights as they are to be quantized.

    Raises:
        ConfigError: it cannot.
    """
    if section.quantization != "none" and device_type != "cpu":
        raise ConfigError(
            f"model.quantization = {section.quantization}: only a CPU computes it, and this worker is on {device_type}; "
            "set model.device to cpu, or model.quantization to none",
            param="model.quantization",
        )
