"""Trees on the host: searches, and prompts behind attach(), on a small model."""

from __future__ import annotations

import json

import pytest

from lab import kernels_tree, second_token, tree_search


def test_the_tree_is_timed_beside_a_flat_scan() -> None:
    for line in kernels_tree.lines(quick=True, length=300, budget=32, threads="1,0", layers=1):
        assert line["speedup"] == line["flat_ms"] / line["tree_ms"] > 0
        assert set(line) >= {"method", "length", "budget", "threads", "build_ms", "rested_ms"}
        assert line["append_ms"] > 0
        assert line["longest_ms"] >= line["head_ms"] > 0


def test_a_prompt_behind_attach_is_timed_to_its_second_token_and_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = "full/600,2xicecache-digest:reuse=2/600@2,0xicecache-copies:layout=page/600/3@2,0xhf-dynamic/600/3@2"
    monkeypatch.setattr("sys.argv", ["second_token", "--shape=tiny", "--chunk=200", f"--prompts={prompts}"])
    monkeypatch.setattr(second_token, "WARM", 0)
    second_token.main()
    full, cold, prompt, steps, drawn, theirs = map(json.loads, capsys.readouterr().out.splitlines())
    assert full["tt2t_s"] > full["seconds"] > 0
    assert cold["index_alone_s"] is None
    assert cold["tt2t_s"] > cold["indexed_s"] > cold["seconds"]
    assert prompt["index_alone_s"] > 0
    assert prompt["indexed_s"] is None, "nobody waited"
    assert (steps["setting"]["method"], steps["setting"]["steps"]) == ("icecache-digest:reuse=2", "eager")
    assert steps["host_ms"]["heads"] > steps["host_ms"]["longest"] > 0
    assert drawn["fill_s"] > 0
    assert (drawn["setting"]["layers"], drawn["dense_layers"]) == (3, 2)
    assert theirs["tpot_s"] > 0


def test_trees_are_searched_for_the_exact_best_keys() -> None:
    queries, keys = next(tree_search.drawn(600))
    found = tree_search.search(0, queries[:2], keys[:2], 90, tree_search.TREES["icecache-digest"])
    assert found["recall_10"] > 0.9
    assert 0 < found["products_share"] <= 1
    spared = tree_search.search(0, queries[:2], keys[:2], 90, {"query_retrieve_share": 0.5, "retrieve_batch": 1})
    assert spared["products"] < found["products"]
