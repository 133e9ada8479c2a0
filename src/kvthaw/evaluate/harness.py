"""kvthaw as a model of lm-evaluation-harness: `kvthaw lm-eval --model_args pretrained=...,method=pariskv,budget=1024 --tasks ...`.

Importing this module registers the model as "kvthaw", so that `lm_eval.simple_evaluate(model="kvthaw", ...)` finds it too.
The harness finds no models of other packages by name. Type `kvthaw lm-eval`, because `lm_eval --model kvthaw` fails.

Which requests the method decides over:

- generate_until (gsm8k, longbench, ruler, ...): the prompt is prefilled densely; every token of the answer after the first
  is decoded through the method.
- loglikelihood (multiple choice, perplexity): scored in one dense pass, so the method has no part in it: these scores are
  full attention's.
- both with `sparse_tokens=N`: the last N tokens of every prompt, which hold the question, and all of a continuation go
  through the method one by one. Prompts run one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from kvthaw.engine.hf import attach
from kvthaw.engine.hf.cache_argument import CACHE
from kvthaw.engine.hf.model import shipped_path
from kvthaw.engine.hub import SHIPPED
from kvthaw.errors import ConfigError, at_least
from kvthaw.evaluate.prefills import Prompt
from kvthaw.evaluate.variant import read_variant


@register_model("kvthaw")
class KvthawLM(HFLM):
    """lm-evaluation-harness's HFLM with its model attached to a method.

    pretrained: as HFLM takes it, or "shipped".
    method: a name with options, its limits perhaps among them ("prkv:page=32:budget=256"). budget, retrieved,
        dense_layers, seed and capture: as for `kvthaw.attach`.
    sparse_tokens: see the module. Everything else is HFLM's: dtype, device (the GPU if there is one), batch_size,
        max_length, chat templates, ...

    Raises ConfigError for settings that no cache of the model would take, and for sparse_tokens with a batch_size above 1.
    """

    def __init__(
        self,
        pretrained: Any = SHIPPED,
        *,
        method: str = "icecache-digest",
        budget: int | float | None = None,
        retrieved: int | float | None = None,
        dense_layers: int | None = None,
        seed: int = 0,
        sparse_tokens: int = 0,
        capture: bool = True,
        device: str | None = None,
        batch_size: int | str | None = 1,
        **kwargs: Any,
    ) -> None:
        at_least(0, sparse_tokens=sparse_tokens)
        if sparse_tokens and str(batch_size) != "1":
            raise ConfigError(f"batch_size is {batch_size}; with sparse_tokens it must be 1")
        super().__init__(
            str(shipped_path()) if pretrained == SHIPPED else pretrained,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            batch_size=batch_size,
            **kwargs,
        )
        self.sparse_tokens, self.seed = sparse_tokens, seed
        self.variant = variant = read_variant(method, budget, retrieved, dense_layers)
        self.handle = attach(self.model, variant.method, **variant.limits, seed=seed, capture=capture)

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """One dense pass that keeps nothing. inps [B, T] -> logits [B, T, V]."""
        with torch.no_grad():
            logits: Tensor = self.model(inps, use_cache=False).logits
        return logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Generate as HFLM does, from a cache that decoded the last `sparse_tokens` of the prompt one by one."""
        if self.sparse_tokens and context.shape[1] > 1:
            # all but the last token, which generate() sends through the cache by itself
            prompt = Prompt(self.model, context[0, :-1].tolist(), self.sparse_tokens - 1, self.seed, [self.variant])
            generation_kwargs[CACHE] = prompt.cache(self.variant)[0]
        out: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return out

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Score requests with HFLM's dense pass, or token by token. Adjacent requests with the same context share its prefill."""
        if not self.sparse_tokens:
            dense: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            return dense
        found: list[tuple[float, bool]] = []
        known: tuple[list[int], Prompt] | None = None
        for strings, context, continuation in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood requests"):
            context = context[-max(1, self.max_length - len(continuation) + 1) :]
            if known is None or known[0] != context:
                known = context, Prompt(self.model, context, self.sparse_tokens, self.seed, [self.variant])
            answer = known[1].loglikelihood(self.variant, continuation)
            found.append(answer)
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return found


def main(arguments: Sequence[str]) -> None:
    """lm-evaluation-harness's own command with `--model kvthaw` before its arguments."""
    sys.argv = ["lm-eval", "run", "--model", "kvthaw", *arguments]
    cli_evaluate()
