"""A few sequences of operations on caches and batches; `lab/fuzz.py` runs as many as there is time for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from machines import AMPLE, MODES, Batches, Caches, Setting

pytestmark = pytest.mark.slow

Caches.TestCase.settings = settings(max_examples=10, stateful_step_count=8)
Batches.TestCase.settings = settings(max_examples=6, stateful_step_count=8)
TestCaches, TestBatches = Caches.TestCase, Batches.TestCase


def test_blocks_that_are_copied_behind_a_step_outlive_its_mode() -> None:
    """Rows that share blocks, decoded in inference mode, and prefilled without it."""
    kind = Setting("llama", "icecache-digest", 16, False, torch.float32, MODES, 0, 4, 16, 1)
    state = Caches()
    state.begin(setting=kind, lengths=[11, 68, 122], cuts=[], announced=True)
    state.fail(at=100, n=20, which=3)
    state.several(n=11, which=5)
    state.reorder(rows=[3, 3, 0, 1], which=2)
    state.step(n=7, which=0)
    state.repeat(times=2, which=1)
    state.several(n=14, which=1)


def test_experts_that_tie_are_no_fault() -> None:
    """Two experts 7e-7 apart in the last layer: transformers takes the other one, too, where embeddings differ in a last bit."""
    kind = Setting("gpt_oss", "full", AMPLE, True, torch.float32, MODES, 0, 16, 16, 0)
    state = Caches()
    state.begin(setting=kind, lengths=[1, 97], cuts=[], announced=False)


def test_the_latest_cache_that_the_model_was_given_is_one_more_holder() -> None:
    """The attached model's handle holds it when nobody else does. Which examples drop it depends on the modules of the process, of
    which Hypothesis takes constants: a whole run found one, and this file alone did not."""
    kind = Setting("llama", "oracle", AMPLE, True, torch.float32, MODES, 0, 16, 16, 0)
    state = Caches()
    state.begin(setting=kind, lengths=[1], cuts=[], announced=False)
    for _ in range(3):  # the third one takes the place of the first
        state.copied(which=0)
    state.teardown()
    state.drop(which=0)
    state.teardown()
