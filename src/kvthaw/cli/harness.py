"""kvthaw lm-eval: lm-evaluation-harness with a method."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

from kvthaw.cli import options
from kvthaw.cli.common import needs
from kvthaw.engine.hub import SHIPPED, offline

EXAMPLES = (
    "model_args: what the harness's hf model takes, and method, budget, retrieved, dense_layers, seed, capture and sparse_tokens; "
    "pretrained=shipped is the model that ships. Needs pip install kvthaw\\[lm-eval].\n\nExamples:\n\n"
    "  kvthaw lm-eval --model_args pretrained=meta-llama/Llama-3.1-8B-Instruct,method=pariskv,retrieved=100 "
    "--tasks longbench,gsm8k --apply_chat_template\n\n"
    "  kvthaw lm-eval --model_args pretrained=MODEL,method=icecache-digest:promote=0.1,budget=256 --tasks ruler "
    "--metadata '{\"max_seq_lengths\": [4096, 32768]}'\n\n"
    "  kvthaw lm-eval --model_args pretrained=MODEL,method=prkv,budget=1024,sparse_tokens=64 --tasks longbench2 --limit 50\n\n"
    "  kvthaw lm-eval --model_args method=oracle,budget=64 --tasks my_task --include_path my_tasks --output_path results"
)


def lm_eval(context: typer.Context, plugin: options.Plugin = None) -> None:
    """Run lm-evaluation-harness with kvthaw as its model; every option is the harness's own.

    It replaces `lm_eval --model kvthaw`, because the harness finds no model of another package by its name. The method
    decodes answers. Likelihoods come from one dense pass without the method. With sparse_tokens=N in model_args, the method
    also decodes the last N tokens of every prompt, and the continuation, one by one.
    """
    for name in re.findall(r"(?<![^,=\s])pretrained=([^,\s]+)", " ".join(context.args)):
        offline(name)
    with needs("lm-evaluation-harness is", "lm-eval"):
        from kvthaw.evaluate import harness
    harness.main(with_path(context.args))


def with_path(arguments: Sequence[str]) -> list[str]:
    """Return the harness's arguments with the shipped model's folder in place of its name. Tasks of a given length, such as
    ruler's, load the tokenizer from `pretrained`."""
    from kvthaw.engine.hf.model import shipped_path

    return [re.sub(rf"(?<![^,=])pretrained={SHIPPED}(?![^,])", f"pretrained={shipped_path()}", one) for one in arguments]
