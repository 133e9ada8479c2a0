"""Principal directions: what ShadowKV and InfiniGen need of a singular value decomposition."""

from __future__ import annotations

import torch
from torch import Tensor

_FIXED = 1e-8
"""Weight of the fixed basis, relative to the mean squared channel, so that rounding does not rotate undetermined directions."""
_ON_HOST = 256
"""Most channels of a matrix that is solved on the host. LAPACK takes 1 ms for 64 and 10 ms for 256; a GPU's solver takes tens
of ms for any."""


def principal(rows: Tensor) -> Tensor:
    """Return V of rows = U S V^T, the largest singular value first: rows [..., n, D] -> [..., D, D] float64, columns
    orthonormal.

    Computed from the eigenvectors of rows^T rows, in float64. Undetermined directions, as with fewer than D rows, come from
    a fixed basis. Directions of singular values below 1e-4 of the root mean square come out mixed. Values that are not
    finite count as 0, since the layer reports them later. The host waits.
    """
    gram = torch.nan_to_num(rows.mT.double() @ rows.double(), nan=0.0, posinf=0.0, neginf=0.0)
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    ramp = torch.linspace(1.0, 2.0, gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = gram + torch.diag_embed(_FIXED * diagonal.mean(dim=-1, keepdim=True) * ramp)
    small = gram.cpu() if gram.shape[-1] <= _ON_HOST else gram
    vectors: Tensor = torch.linalg.eigh(small).eigenvectors
    return vectors.flip(-1).to(rows.device)
