"""A folder of prompts' KV gives each prompt the one that begins most like it."""

from __future__ import annotations

from pathlib import Path

import torch

from kvthaw import Cache
from lab.evaluate.kv_dir import KvDir
from zoo import build, prompt


@torch.no_grad()
def test_a_prompt_takes_the_longest_beginning_that_is_kept(tmp_path: Path) -> None:
    """One that shares less than half is kept, too; what is kept serves another process."""
    model, folder, taken = build("llama"), KvDir(tmp_path), list[int]()
    first = prompt(1, 100)[0].tolist()
    other = [(token + 1) % model.config.vocab_size for token in first]
    for ids in (first, [*first, 7], [*first[:60], *other[60:]], other, [*other, 7]):
        cache = Cache(model, "oracle", budget=48)
        taken.append(folder.fill(cache, ids))
        model(torch.tensor([ids[taken[-1] :]]), past_key_values=cache)
        folder.keep(cache, ids, taken[-1])
    assert taken == [0, 100, 60, 0, 100]
    assert len(list(tmp_path.iterdir())) == 2
    assert KvDir(tmp_path).fill(Cache(model, "oracle", budget=48), [*other, 9]) == 100
