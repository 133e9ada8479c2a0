"""Take all kinds of decode steps of a running batch before requests come."""

from __future__ import annotations

from kvthaw.engine.batch import Batch

_TOKENS = 5  # of which the first comes with the prompt, two from eager steps, and one with a capture


def warm(batch: Batch) -> None:
    """Allocate all that a step of a batch without requests needs, and capture steps of every number of sequences, so that no
    request waits for that."""
    seqs, captures = 1, batch.cache.model.device.type == "cuda"
    while True:
        for _ in range(seqs):
            batch.prefill(batch.join([0], max_new_tokens=_TOKENS, stop=()))
        while batch.requests:
            batch.step()
        if not captures or seqs == batch.max_seqs:
            return
        seqs = min(2 * seqs, batch.max_seqs)
