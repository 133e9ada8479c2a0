"""The public face: what is visible is what is promised, importing it changes nothing and needs no package of the command line."""

from __future__ import annotations

import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import kvthaw

SOURCE = Path(kvthaw.__file__).parents[1]
ROOT = Path(__file__).parents[1]
SCRIPTS = (
    "figures",
    "second_token",
    "kernels_decode",
    "kernels_nodes",
    "kernels_pages",
    "kernels_pariskv",
    "kernels_transfer",
    "kernels_tree",
)


def run(program: str) -> str:
    """What a program prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(SOURCE)!r}, {str(ROOT)!r}]\n{program}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_has_three_numbers_and_is_the_one_to_cite() -> None:
    assert kvthaw.__version__.count(".") == 2
    baselines = tomllib.loads((ROOT / "packages/kvthaw-baselines/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (baselines["version"], baselines["dependencies"]) == (kvthaw.__version__, [f"kvthaw=={kvthaw.__version__}"])
    assert f"\nversion: {kvthaw.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {kvthaw.__version__} (" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_public_things_are_documented() -> None:
    assert kvthaw.__doc__
    for name in kvthaw.__all__:
        thing = getattr(kvthaw, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name
            for member, value in vars(thing).items():
                if inspect.isfunction(value) and not member.startswith("_"):
                    inherited = any(getattr(base, member, None) for base in thing.__mro__[1:])
                    assert value.__doc__ or inherited, f"{name}.{member}"


def test_importing_changes_nothing_and_needs_torch_and_transformers_alone() -> None:
    """Nor does what runs on a machine with a GPU, one process for all: each takes seconds to import torch."""
    program = """
sys.modules.update(dict.fromkeys(("typer", "rich", "matplotlib", "datasets", "lm_eval")))  # as if they were not installed
import kvthaw
assert "torch" not in sys.modules, "a name that needs no torch imports none"
assert kvthaw.__version__
for name in [name for name in sys.modules if name.partition(".")[0] == "kvthaw"]:
    del sys.modules[name]
del kvthaw

import os, threading
import torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface
import warnings, logging, random

def world():
    return {
        "attention": sorted(AttentionInterface().valid_keys()),
        "masks": sorted(AttentionMaskInterface().valid_keys()),
        "threads": threading.active_count(),
        "environment": dict(os.environ),
        "torch threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "seed": torch.random.get_rng_state().sum().item(),
        "random": hash(random.getstate()),
        "filters": len(warnings.filters),
        "loggers": [type(h).__name__ for h in logging.getLogger().handlers],
        "cuda": torch.cuda.is_initialized(),
        "folder": os.getcwd(),
    }

before = world()
import kvthaw
for name in kvthaw.__all__:
    getattr(kvthaw, name)
after = world()
assert before == after, {k: (before[k], after[k]) for k in before if before[k] != after[k]}
assert "kvthaw" not in after["attention"]
modules = {name.split(".")[1] for name in sys.modules if name.startswith("kvthaw.")}
visible = {name for name in dir(kvthaw) if not name.startswith("_")} - modules - {"annotations"}
promised = set(kvthaw.__all__) - {"__version__"}
assert visible == promised, visible ^ promised
for make in kvthaw.METHODS.values():
    make()
assert world() == before, "nor does making a method"

from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
before = model.config._attn_implementation  # attaching does change something
hooks = len(model._forward_pre_hooks)
handle = kvthaw.attach(model, "oracle", budget=32)
assert "kvthaw" in AttentionInterface().valid_keys()
assert model.config._attn_implementation == "kvthaw"
handle.detach()
assert model.config._attn_implementation == before
assert len(model._forward_pre_hooks) == hooks
assert "forward" not in vars(model)
"""
    run(program + "".join(f"import lab.{name}\n" for name in SCRIPTS))


def test_settings_and_results_are_frozen() -> None:
    import dataclasses

    from kvthaw.cache.plan import Plan, Settings
    from kvthaw.config import CacheConfig

    for cls in (kvthaw.Stats, kvthaw.Method, CacheConfig, Settings, Plan):
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen


def test_every_setting_is_an_argument_with_its_default() -> None:
    import dataclasses
    import inspect

    from kvthaw.config import CacheConfig

    for function in (kvthaw.Cache, kvthaw.attach):
        arguments = {name: one.default for name, one in inspect.signature(function).parameters.items()}
        assert dataclasses.asdict(CacheConfig()).items() <= arguments.items()
