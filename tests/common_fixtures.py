"""What every test stands on: the interpreter for kernels, one thread, fixed seeds, tiny models."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of every thread; torch.set_num_threads() is for the calling one

import torch

if not torch.cuda.is_available():  # before triton is imported anywhere
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings
from transformers import PreTrainedModel
from transformers.utils.logging import set_verbosity_error

import bytemodel
from kvthaw.bench import decode
from kvthaw.bench.shapes import SHAPES
from kvthaw.engine.hf.model import load
from kvthaw.kernels import HAS_TRITON
from kvthaw.method_names import BASELINES
from lab.bench import prefill, shaped
from timed import tinier
from zoo import build

settings.register_profile("kvthaw", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("kvthaw")
torch.set_num_threads(1)
if HAS_TRITON and not torch.cuda.is_available():
    import interpreter

    interpreter.quicken()
set_verbosity_error()
vars(typer.testing)["_get_command"] = functools.cache(typer.main.get_command)  # which takes longer than most commands


LONG = (
    "tests/bench/",
    "tests/lab/",
    "tests/cli/",
    "tests/methods/",
    "tests/reproduce/",
    "tests/cache/test_device_step.py",
    "tests/cache/test_fractions.py",
    "tests/cache/test_look_ahead.py",
    "tests/cache/test_placement.py",
    "tests/cache/test_prefetched_search.py",
    "tests/cache/test_slab.py",
    "tests/engine/test_ahead.py",
    "tests/engine/test_architectures.py",
    "tests/engine/test_assisted.py",
    "tests/engine/test_batch.py",
    "tests/engine/test_crop.py",
    "tests/engine/test_failures.py",
    "tests/engine/test_fp8.py",
    "tests/engine/test_generate.py",
    "tests/engine/test_inference_mode.py",
    "tests/engine/test_limits.py",
    "tests/engine/test_multimodal.py",
    "tests/engine/test_output.py",
    "tests/engine/test_prefix.py",
    "tests/engine/test_scheduler.py",
    "tests/engine/test_tensor_parallel.py",
    "tests/index/test_codes.py",
    "tests/index/test_every_index.py",
    "tests/index/test_tree.py",
    "tests/kernels/test_bucket_topk.py",
    "tests/kernels/test_cover.py",
    "tests/kernels/test_flash_decode.py",
    "tests/kernels/test_in_place.py",
    "tests/kernels/test_kmeans.py",
    "tests/kernels/test_merge.py",
    "tests/kernels/test_page_bounds.py",
    "tests/kernels/test_planes.py",
    "tests/kernels/test_row_format.py",
    "tests/kernels/test_unit_select.py",
    "tests/serve/test_manners.py",
    "tests/serve/test_responses.py",
)
"""Suites of many short tests that take minutes together: part of make test, like what is marked slow, and not of make check."""

REPRESENTATIVE = ("oracle", "icecache-digest", "pariskv", "clusterkv")
"""Methods whose contract make check tests too: exact, a tree on the host, codes on the device, clusters."""


def is_long(item: pytest.Item) -> bool:
    """Whether an item belongs to a long suite and does not test the contract of a representative method."""
    in_contract = item.nodeid.startswith("tests/methods/test_contract.py")
    method = item.callspec.params.get("name") if in_contract and hasattr(item, "callspec") else None
    return item.nodeid.startswith(LONG) and method not in REPRESENTATIVE


def names_baseline(item: pytest.Item) -> bool:
    """Whether an item is the case of a test over methods for one of kvthaw-baselines."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(isinstance(param, str) and param.split(":")[0] in BASELINES for param in params)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: not any(map(item.get_closest_marker, ("model", "slow")))
    )  # the longest first: workers end together
    for item in items:
        if is_long(item):
            item.add_marker(pytest.mark.slow)
        if names_baseline(item):
            item.add_marker(pytest.mark.baseline)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What has been loaded stays: no collection of garbage, of which benchmarks ask for many, need look at it again."""
    for name, logger in logging.root.manager.loggerDict.items():  # pytest would add handlers to each that has no parent
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.enable()


SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""Without a GPU torch.manual_seed() keeps the stack of each call for the first use of one."""


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """Also one thread, for two test processes that take two each slow each other down several times."""
    SEED(0)
    yield
    assert torch.get_num_threads() == 1, "the test left more threads to those after it"


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """What other files have loaded and built stays: collections that tests of this one ask for take a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _unhurried() -> Iterator[None]:
    """Benchmarks of tiny shapes leave garbage to Python: collecting it between two settings takes longer than they do."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (decode, prefill, shaped) if not torch.cuda.is_available() else ():
            patch.setattr(module, "free", lambda: None)
        yield


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU if there is one, else the CPU (kernels under the interpreter)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def llama() -> PreTrainedModel:
    """A tiny Llama of 2 layers, 4 query and 2 KV heads, with sharp random weights; of the test's own."""
    return build("llama")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of a few bytes' vocabulary, with its tokenizer. Tests that change it copy it first."""
    return bytemodel.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a token that ends a generation."""
    return bytemodel.save(tmp_path_factory.mktemp("endless"), ends=False)


@pytest.fixture
def model(folder: Path) -> str:
    """The name of that model on the command line."""
    return str(folder)


@pytest.fixture(scope="session")
def _loaded(folder: Path) -> tuple[Any, Any]:
    return load(str(folder))


@pytest.fixture
def loaded(_loaded: tuple[Any, Any]) -> tuple[Any, Any]:
    """That model and its tokenizer, of the test's own."""
    return copy.deepcopy(_loaded)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape "tiny" of the benchmarks is tinier."""
    monkeypatch.setitem(SHAPES, "tiny", tinier())
