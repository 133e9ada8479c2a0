"""A small part of the campaign of faults."""

from __future__ import annotations

from lab.faults import campaign


def test_no_fault_gives_wrong_kv() -> None:
    found = {line.pop("fault"): line for line in campaign(kill=6, flips=40, refused=3, requests=2, every=16)}
    for fault, counts in found.items():
        assert not [name for name, count in counts.items() if name.startswith("wrong") and count], fault
    assert found["flip"]["warned"] + found["flip"].get("old", 0) == 40
    assert found["refused"]["old"] == 3
    assert found["memory"]["refused"]
