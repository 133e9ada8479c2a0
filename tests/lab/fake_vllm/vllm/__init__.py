"""Stands in for vLLM: a token a step for each request, at once. Prompts of 77 tokens end the process, of 99 never end a step, and
those of 55 raise."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.fake"


class _Engine:
    def __init__(self, seqs: int) -> None:
        pool = SimpleNamespace(num_gpu_blocks=1000)
        scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool))
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, async_scheduling=True),
        )
        self._seqs, self._left = seqs, dict[str, tuple[int, Any, int]]()

    def add_request(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> None:
        self._left[name] = len(prompt["prompt_token_ids"]), params, 0

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        outputs = []
        for name, (length, params, given) in list(self._left.items())[: self._seqs]:
            if length == 77:
                os._exit(3)
            if length == 99:
                time.sleep(600)
            if length == 55:
                del self._left[name]
                raise MemoryError("no room for 55 tokens")
            self._left[name] = length, params, given + 1
            if given + 1 == params.max_tokens:
                del self._left[name]
            top = {token: SimpleNamespace(logprob=-1.0 - token) for token in range(params.logprobs or 0)}
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0], logprobs=[top])]))
        time.sleep(0.001)
        return outputs


class LLM:
    def __init__(self, model: str, max_num_seqs: int, **settings: Any) -> None:
        assert os.path.exists(os.path.join(model, "config.json"))
        if settings["load_format"] == "auto":
            assert os.path.getsize(os.path.join(model, "model.safetensors"))
        self.llm_engine = _Engine(max_num_seqs)

    def reset_prefix_cache(self) -> bool:
        return True
