"""Embeddings as tensors and as bytes.

The only module of this package that knows torch. ``connectors.ec.worker`` receives these functions as arguments; the
simulation passes its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from core.ec_connector import EmbeddingsLayout


def to_bytes(rows: torch.Tensor) -> memoryview:
    """Return the bytes of rows [num_embeds, hidden_size] on any device, in the order of their memory. Waits for a device."""
    on_host = rows.detach().to("cpu").contiguous()
    flat: npt.NDArray[np.uint8] = on_host.view(torch.uint8).reshape(-1).numpy()
    return flat.data


def to_tensor(content: memoryview, layout: EmbeddingsLayout) -> torch.Tensor:
    """Return a copy of bytes as rows [num_embeds, hidden_size] on the layout's device."""
    own = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
    rows = own.view(getattr(torch, layout.dtype)).reshape(-1, layout.hidden_size)
    return rows.to(layout.device)
