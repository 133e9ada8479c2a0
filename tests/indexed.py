"""What holds between operations of a cache for the states of its sequences in indexes."""

from __future__ import annotations

from kvthaw.cache.index_updater import Ready, SideIndex, Waiting
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.passes import updaters


def check(kv: KVCache) -> None:
    """Assert that each state is one that its sequence can have. Nothing is said while a step that failed is not rolled back."""
    sequences, gone = kv.sequences, {seq for _, seq in kv._cleared}
    if sequences.step is not None:
        return
    for layer, updater in updaters(kv.offloaded):
        assert [own.seq for own in updater._of] == list(range(layer.store.seqs))
        for own in updater._of:
            assert not isinstance(own.state, Waiting), "its step is committed, or was dropped"
            assert own.before is None, "no step is under way that could fail"
            assert not isinstance(own.state, SideIndex) or (own.seq in sequences.paused and updater.builds_beside)
            assert own.last is None or own.first <= own.last <= own.upto
            if own.seq in gone or own.seq >= sequences.count:
                continue
            length = sequences.length(own.seq)
            ready, ends = isinstance(own.state, Ready), [sequences.indexed(own.seq, length + coming) for coming in (0, 1)]
            assert own.first <= own.upto <= max(own.first, ends[1] if ready else ends[0]), "at most one buffer ahead"
            assert length or (ready and own.upto == own.first)
            if ready and not updater.retriever.index.traits.on_host:
                assert own.upto >= ends[0], "an index on the device cannot read what left the ring"
