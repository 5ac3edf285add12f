"""What running out of memory looks like."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """True for what torch raises when a device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
