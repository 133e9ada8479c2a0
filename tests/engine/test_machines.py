"""A few sequences of operations on caches and batches; `benchmarks/fuzz.py` runs as many as there is time for."""

from __future__ import annotations

import pytest
from hypothesis import settings

from machines import Batches, Caches

pytestmark = pytest.mark.slow

Caches.TestCase.settings = settings(max_examples=24, stateful_step_count=8)
Batches.TestCase.settings = settings(max_examples=12, stateful_step_count=8)
TestCaches, TestBatches = Caches.TestCase, Batches.TestCase
