"""Principal directions: what ShadowKV and InfiniGen need of a singular value decomposition."""

from __future__ import annotations

import torch
from torch import Tensor

_ON_HOST = 256
"""Channels up to which a matrix goes to the host: a GPU's solver takes tens of ms for the smallest, LAPACK 1 for 64, 10 for 256."""


def principal(rows: Tensor) -> Tensor:
    """V of rows = U S V^T, the largest singular value first: rows [..., n, D] -> [..., D, D] float64, columns orthonormal.

    From the eigenvectors of rows^T rows, in float64: directions of singular values below 1e-8 of the largest come out mixed. What
    is not finite counts as 0, for the layer itself says so later. The host waits.
    """
    gram = torch.nan_to_num(rows.mT.double() @ rows.double(), nan=0.0, posinf=0.0, neginf=0.0)
    small = gram.cpu() if gram.shape[-1] <= _ON_HOST else gram
    vectors: Tensor = torch.linalg.eigh(small).eigenvectors
    return vectors.flip(-1).to(rows.device)
