"""Linear layers of a decoder layer that read the same input, and what calibration rows tell of it."""

from __future__ import annotations

import torch
from torch import nn


class Group:
    """Linear layers that read the same input, and the sum of its outer products."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.linears: dict[str, nn.Linear] = {}
        self.hessian = torch.zeros(size, size, device=device)
        self.tokens = 0

    def add(self, x: torch.Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        with torch.autocast(rows.device.type, enabled=False):
            self.hessian.addmm_(rows.t(), rows)
        self.tokens += len(rows)
