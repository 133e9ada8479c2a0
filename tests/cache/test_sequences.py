"""Lengths of a cache's sequences, counted once a step, on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvthaw.cache import sequences
from kvthaw.cache.sequences import DeviceLengths, Sequences
from kvthaw.cache.step import Known, Moves
from kvthaw.regions import Regions

CPU = torch.device("cpu")
regions = st.builds(Regions, st.integers(0, 4), st.integers(1, 6), st.integers(1, 5))


def prompted(lengths: list[int], of: Regions | None = None) -> Sequences:
    """Sequences after a padded prompt."""
    found = Sequences()
    if of is not None:
        found.divide(of, 4)
    found.commit(found.begin(max(lengths), [max(lengths) - n for n in lengths]))
    return found


def decode(of: Sequences, tokens: int = 1) -> None:
    of.commit(of.begin(tokens, dense=False))


def lengths(of: Sequences) -> list[int]:
    return [of.length(seq) for seq in range(of.count)]


def test_a_step_counts_when_it_is_committed() -> None:
    of = prompted([5, 9])
    step = of.begin(1, dense=False)
    assert (lengths(of), step.lengths(1)) == ([5, 9], [6, 10])
    of.commit(step)
    assert (lengths(of), of.padded_length, of.step) == ([6, 10], 10, None)


def test_a_step_that_was_not_committed_is_taken_again() -> None:
    of = prompted([5, 9])
    version = of.version
    of.begin(1, dense=False)
    of.begin(2, dense=True)
    step = of.begin(1, dense=False)
    of.commit(step)
    assert (lengths(of), of.version) == ([6, 10], version)


@pytest.mark.parametrize("dense", [True, False])
def test_a_step_of_a_forward_that_failed_later_is_not_counted(dense: bool) -> None:
    of = prompted([5, 9], Regions(1, 2, 2))
    before = lengths(of), [of.indexed(seq) for seq in range(2)], of.decoded, replace(of.held)
    step = of.begin(3, dense=dense)
    of.commit(step)
    assert lengths(of) == [8, 12]
    of.uncommit()
    assert (lengths(of), [of.indexed(seq) for seq in range(2)], of.decoded, of.held) == before
    assert of.step is step


def test_a_ring_that_was_full_before_a_forward_that_failed_is_full_again() -> None:
    of = prompted([5], Regions(1, 2, 3))
    while not of.full():
        decode(of)
    version = of.version
    decode(of)
    assert not of.full()
    of.uncommit()
    assert of.full()
    assert of.version > version


@given(of=regions, prompts=st.lists(st.integers(1, 30), min_size=1, max_size=3), steps=st.integers(0, 40))
def test_rings_begin_and_are_full_as_regions_say(of: Regions, prompts: list[int], steps: int) -> None:
    found, starts = prompted(prompts, of), [of.first_indexed(n) for n in prompts]
    for step in range(steps):
        now = [n + step for n in prompts]
        full = [seq for seq, n in enumerate(now) if of.full(starts[seq], n)]
        assert found.full() == bool(full)
        assert [seq for seq, *_ in found.leaving()] == full
        for seq, begin, stop in found.leaving():
            assert (begin, stop) == (of.indexed(starts[seq], now[seq]), of.indexed(starts[seq], now[seq] + 1))
        for ahead in range(4):
            assert found.full(ahead) == any(of.full(starts[seq], n + ahead) for seq, n in enumerate(now))
        decode(found)
    assert found.held.steps == steps * len(prompts)


@given(of=regions, prompts=st.lists(st.integers(1, 30), min_size=1, max_size=3), steps=st.integers(1, 30))
def test_device_counters_follow(of: Regions, prompts: list[int], steps: int) -> None:
    found = prompted(prompts, of)
    addresses = None
    for _ in range(steps):
        step = found.begin(1, dense=False)
        for _ in range(2):  # every layer asks
            found.place(step, 0, CPU)
            want = step.lengths(1)
            assert found.on_device.lengths.tolist() == want
            assert found.on_device.starts.tolist() == [found.indexed(seq, n) for seq, n in enumerate(want)]
        now = [tensor.data_ptr() for tensor in found.on_device.tensors()]
        assert addresses in (None, now), "a captured step reads them where they were"
        addresses = now
        found.commit(step)


def test_a_replay_advances_the_device_counters() -> None:
    of = prompted([9, 4], Regions(1, 2, 2))
    of.place_before_step(CPU)
    assert of.on_device.lengths.tolist() == [9, 4]
    step = of.begin(1, dense=False)
    of.on_device.lengths.add_(of.on_device.live)  # what a replay does on the device
    of.commit(step)
    of.count_replay()
    of.place_before_step(CPU)
    assert of.on_device.lengths.tolist() == [10, 5]
    of.on_device.lengths.add_(of.on_device.live)  # one that failed behind its first graph
    of.forget_device()
    of.place_before_step(CPU)
    assert of.on_device.lengths.tolist() == [10, 5]


def test_what_the_device_holds_is_not_written_again() -> None:
    of = DeviceLengths()
    of.set([9, 0], [1, 0], [1, 0], CPU)
    of.advance()  # a replay added a token to the first; the second is idle
    of.lengths.fill_(-1)
    of.set([10, 0], [1, 0], [1, 0], CPU)
    assert of.lengths.tolist() == [-1, -1]
    of.set([10, 3], [1, 0], [1, 1], CPU)
    assert of.lengths.tolist() == [10, 3]


def test_a_write_that_failed_is_repeated_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    of = DeviceLengths()
    of.set([9, 5], [1, 1], [1, 1], CPU)
    real, given = sequences.upload, iter(range(1))

    def upload(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if next(given, None) is None:
            raise KeyboardInterrupt
        return real(values, dtype, device)

    with monkeypatch.context() as patch:
        patch.setattr(sequences, "upload", upload)
        with pytest.raises(KeyboardInterrupt):
            of.set([20, 7], [4, 1], [1, 1], CPU)
    of.set([10, 6], [1, 1], [1, 1], CPU)
    assert (of.lengths.tolist(), of.starts.tolist()) == ([10, 6], [1, 1])


def test_a_prompt_goes_to_one_sequence() -> None:
    of = Sequences()
    of.open(3, 100)
    of.divide(Regions(1, 4, 2), 4)
    for seq, tokens in ((1, 20), (2, 7)):
        with of.prompts({seq: tokens}):
            for part in (5, tokens - 5):
                step = of.begin(part)
                assert step.parts == ((seq, part),)
                of.commit(step)
    assert (lengths(of), of.idle) == ([0, 20, 7], frozenset({0}))
    assert [of.indexed(seq) for seq in (1, 2)] == [16, 3]
    decode(of)
    assert lengths(of) == [0, 21, 8]
    of.clear(1)
    assert (lengths(of), of.idle, of.padded_length) == ([0, 0, 8], frozenset({0, 1}), 8)


def test_steps_of_others_leave_a_paused_sequence_and_its_full_ring_as_they_are() -> None:
    of = prompted([9, 9], Regions(1, 4, 2))
    while not of.full():
        decode(of)
    (one, other), held = of.leaving(), of.length(0)
    assert (one[0], other[0]) == (0, 1)
    of.pause(0)
    for _ in range(5):
        assert [seq for seq, *_ in of.leaving()] == [1] * of.full()
        decode(of)
    assert (of.length(0), of.length(1)) == (held, held + 5)
    of.pause(1)
    assert not of.full()
    of.resume(0)
    assert of.leaving() == [one]


def test_prompts_come_one_after_the_other_in_one_step() -> None:
    of = Sequences()
    of.open(4, 100)
    of.divide(Regions(1, 4, 2), 4)
    with of.prompts({2: 20, 0: 7}):
        assert (of.past, of.prefill_remaining, of.lacks()) == (0, 27, {2: 20, 0: 7})
        step = of.begin(27)
        assert (step.remaining, step.longest) == (0, 20)
        assert [(row.seq, row.start, row.stop, row.past, row.length) for row in step.rows()] == [
            (2, 0, 20, 0, 20),
            (0, 20, 27, 0, 7),
        ]
        of.commit(step)
    assert (lengths(of), of.idle, of.filling) == ([7, 0, 20, 0], frozenset({1, 3}), {})
    assert [of.indexed(seq) for seq in (0, 2)] == [3, 16]


def prefill(of: Sequences, tokens: dict[int, int]) -> None:
    """Take prompts of some sequences in one step."""
    with of.prompts(tokens):
        of.commit(of.begin(sum(tokens.values())))


KNOWN = Known(7, (5, 0), (40, False), 7, 90)
CHANGES: dict[str, Callable[[Sequences], object]] = {
    "crop": lambda of: of.crop(3),
    "reorder": lambda of: of.reorder([1, 0, 1]),
    "set_length": lambda of: of.set_length(0, 2),
    "pause": lambda of: of.pause(1),
    "resume": lambda of: (of.pause(1), setattr(of, "known", KNOWN), of.resume(1)),
    "clear": lambda of: of.clear(0),
    "narrow": lambda of: of.narrow(1),
    "widen": lambda of: of.widen(),
    "divide": lambda of: of.divide(Regions(2, 3, 1), 4),
    "adopt": lambda of: of.adopt([3, 4]),
    "forget_prompt": lambda of: of.forget_prompt(),
    "uncommit": lambda of: of.uncommit(),
    "open": lambda of: of.open(3, 100),
    "a prompt": lambda of: of.commit(of.begin(3)),
    "prompts": lambda of: prefill(of, {1: 3}),
    "reset": lambda of: of.reset(),
}


def test_decoded_tokens_leave_what_is_known() -> None:
    of = prompted([5, 9], Regions(1, 2, 2))
    version, of.known.prepared = of.version, (40, False)
    for _ in range(20):
        decode(of)
    assert (of.version, of.known.prepared) == (version, (40, False))


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_change_makes_all_that_is_known_void(change: str) -> None:
    """Else a captured step would go on with addresses and lengths of before."""
    of = prompted([5, 9], Regions(1, 2, 2))
    version, of.known = of.version, KNOWN
    CHANGES[change](of)
    assert of.version > version
    assert (of.known.prepared, of.known.flushed) == (None, -1)


changes = st.lists(
    st.tuples(st.sampled_from(["set", "pause", "resume", "clear", "decode", "move"]), st.integers(0, 4), st.integers(0, 9))
)


@given(st.lists(st.integers(1, 9), min_size=5, max_size=5), changes)
def test_a_change_of_one_sequence_leaves_the_others_as_they_are(prompts: list[int], made: list[tuple[str, int, int]]) -> None:
    """With as little padding as possible, and who is empty or paused is idle."""
    of, known, paused = Sequences(), [0] * 5, set[int]()
    of.open(5, 100)
    for seq, length in enumerate(prompts):
        of.set_length(seq, length)
        known[seq] = length
    for change, seq, number in made:
        if change == "set":
            of.set_length(seq, number)
            known[seq] = number
        elif change == "clear":
            of.clear(seq)
            known[seq] = 0
            paused.discard(seq)
        elif change == "decode":
            idle = paused | {at for at, n in enumerate(known) if not n}
            if len(idle) < 5 and not any(at not in idle and of.length(at) == 0 for at in range(5)):
                decode(of)
                known = [n + (at not in idle) for at, n in enumerate(known)]
            continue  # in which padding may grow
        elif change == "move":
            to = number % 5
            if known[seq] and not known[to] and not {seq, to} & paused:
                of.move(Moves({seq: to}))
                known[to], known[seq] = known[seq], 0
        else:
            getattr(of, change)(seq)
            (paused.add if change == "pause" else paused.discard)(seq)
        assert lengths(of) == known
        assert of.idle == paused | {at for at, n in enumerate(known) if not n}
        assert change == "move" or of.padded_length == max(known)
