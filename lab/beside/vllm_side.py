"""vLLM's side: `python -m lab.beside.vllm_side PLAN` in the environment that has vLLM.

One engine serves all cases of the process, with FlashAttention, CUDA graphs and dummy weights of the shape, and vLLM's own defaults
of what is not named here. It runs in this process, so that its steps are timed as those of kvthaw's scheduler are: no HTTP.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.arrivals import Arrival, random_prompt
from lab.beside.cases import (
    CHECK,
    MANY,
    Case,
    coming_of,
    config_of,
    emit,
    first_of,
    planned,
    serve_cases,
    served_of,
    steps_of,
)

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Sequences of a step for which vLLM captures one; those between are padded."""
SERVER_TOKENS = 8192
"""Tokens of a step of vLLM's server on such a card; its LLM class has twice as many."""
WARM_SEED = 1 << 20


def settings(cases: Sequence[Case], options: dict[str, Any], folder: str, memory: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for some cases.

    memory: bytes of the GPU.
    """
    many, check = cases[0].part in MANY, cases[0].part in CHECK
    precision, card = cases[0].precision, cases[0].card
    longest = max(case.length + (0 if case.part == "trace" else case.new) for case in cases) + 64
    seqs = int(options["places"]) if many else 1 if card else 16
    found = {
        "model": folder,
        "load_format": "auto" if check else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto" if precision == "bf16" else "fp8",
        "quantization": "fp8" if precision == "fp8" else None,
        "tensor_parallel_size": cases[0].gpus,
        "gpu_memory_utilization": card * 2**30 / memory if card else float(options["vllm_share"]),
        "cpu_offload_gb": float(options["vllm_offload"]),
        "max_model_len": longest,
        "max_num_seqs": seqs,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "disable_cascade_attn": True,
        "seed": 0,
        "attention_config": {"backend": "FLASH_ATTN"},
        "generation_config": "vllm",
    }
    if check:
        return found | {"enforce_eager": True}
    if many or card:
        found["max_num_batched_tokens"] = SERVER_TOKENS
    return found | {"compilation_config": {"cudagraph_capture_sizes": [size for size in SIZES if size <= seqs]}}


class Engine:
    """vLLM's engine, and the requests that it has been given so far."""

    def __init__(self, cases: Sequence[Case], options: dict[str, Any]) -> None:
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
        import torch
        import vllm
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        folder = options["checkpoint"] if cases[0].part in CHECK else tempfile.mkdtemp()
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        given = settings(cases, options, folder, memory)
        config = config_of(options["sizes"], cases[0].layers, max(131072, given["max_model_len"]))
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.vocabulary: int = config["vocab_size"]
        begin = time.perf_counter()
        self._llm = LLM(**given)
        self.engine = self._llm.llm_engine
        self._new, self._kind, self._count = SamplingParams, RequestOutputKind.DELTA, 0
        whole = self.engine.vllm_config
        pool = self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self.kv_tokens: int = pool.num_gpu_blocks * whole.cache_config.block_size
        self.about = {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "start_s": round(time.perf_counter() - begin, 1),
            "kv_tokens": self.kv_tokens,
            "kv_dtype": given["kv_cache_dtype"],
            "step_tokens": whole.scheduler_config.max_num_batched_tokens,
            "async_scheduling": whole.scheduler_config.async_scheduling,
            "weights": given["load_format"],
            "offload_gib": given["cpu_offload_gb"],
        }

    def add(self, prompt: Any, new: int, **more: Any) -> str:
        """Give the engine a request of `new` tokens. Returns its name."""
        self._count += 1
        name = f"r{self._count}"
        how = self._new(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=self._kind, **more)
        self.engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, how)
        return name

    def serve(self, prompts: Sequence[Any], coming: Sequence[Arrival]) -> tuple[list[list[float]], float]:
        """Serve requests as they come. Returns when the tokens of each came, and the seconds of all."""
        asked, tokens, place = 0, [list[float]() for _ in coming], dict[str, int]()
        begin = time.perf_counter()
        while asked < len(coming) or self.engine.has_unfinished_requests():
            now = time.perf_counter() - begin
            while asked < len(coming) and coming[asked].at <= now:
                place[self.add(prompts[asked], coming[asked].new)] = asked
                asked += 1
            if not self.engine.has_unfinished_requests():
                time.sleep(max(0.0, coming[asked].at - now))
                continue
            outputs = self.engine.step()
            at = time.perf_counter() - begin
            for output in outputs:
                tokens[place[output.request_id]] += [at] * len(output.outputs[0].token_ids)
        whole = time.perf_counter() - begin
        lacking = [(one.new, len(got)) for one, got in zip(coming, tokens, strict=True) if one.new != len(got)]
        if lacking:
            raise RuntimeError(f"vLLM gave {len(lacking)} requests other numbers of tokens than asked for: {lacking[:3]}")
        return tokens, whole

    def together(self, prompts: Sequence[Any], new: int) -> list[list[float]]:
        """Serve requests that come at once. Returns when the tokens of each came."""
        return self.serve(prompts, [Arrival(0.0, len(prompt), new) for prompt in prompts])[0]

    def prompts(self, case: Case, count: int) -> list[Any]:
        """Draw the prompts of a case."""
        return [random_prompt(self.vocabulary, case.length, seed) for seed in range(count)]

    def reset(self) -> None:
        """Forget the KV of earlier prompts. Raises RuntimeError where vLLM keeps it."""
        for _ in range(3):
            if self._llm.reset_prefix_cache():
                return
            self.together([random_prompt(self.vocabulary, 8, WARM_SEED)], 2)  # its steps let go of what ended last
        raise RuntimeError("vLLM does not empty its prefix cache; first tokens would come from it")

    def measure(self, case: Case) -> dict[str, Any]:
        """Measure a case."""
        self.reset()
        return {"about": self.about, **getattr(self, case.part)(case)}

    def first(self, case: Case) -> dict[str, Any]:
        """Time the first tokens of two prompts, one after the other."""
        return first_of([self.together([prompt], 1)[0][0] for prompt in self.prompts(case, 2)])

    def decode(self, case: Case) -> dict[str, Any]:
        """Time the tokens after one prompt."""
        times = self.together(self.prompts(case, 1), case.new)[0]
        return first_of(times[:1]) | steps_of(times)

    def batch(self, case: Case) -> dict[str, Any]:
        """Time the steps of as many prompts as fit. The prefix cache keeps each, so all come at once then."""
        fit = (self.kv_tokens - 16) // (case.length + 2 * case.new + 64)
        seqs = min(fit, case.seqs or fit, 16)
        if not seqs:
            raise RuntimeError(f"{case.length} tokens do not fit vLLM's KV cache of {self.kv_tokens}")
        prompts = self.prompts(case, seqs)
        first = [self.together([prompt], 1)[0][0] for prompt in prompts]
        tokens = self.together(prompts, case.new)
        begin, end = max(times[0] for times in tokens), min(times[-1] for times in tokens)
        steps = sorted({at for times in tokens for at in times if begin <= at <= end})
        return first_of(first) | steps_of(steps, seqs)

    def short(self, case: Case) -> dict[str, Any]:
        """Serve many requests."""
        coming = coming_of(case, "")
        return self._many(coming)

    def trace(self, case: Case) -> dict[str, Any]:
        """Serve the requests of a trace."""
        return self._many(coming_of(case, OPTIONS["traces"]))

    def _many(self, coming: Sequence[Arrival]) -> dict[str, Any]:
        drawn = [random_prompt(self.vocabulary, one.prompt, WARM_SEED + seed) for seed, one in enumerate(coming)]
        self.together(drawn, 1)
        self.together(drawn[:64], 16)
        self.reset()
        prompts = [random_prompt(self.vocabulary, one.prompt, seed) for seed, one in enumerate(coming)]
        tokens, whole = self.serve(prompts, coming)
        return served_of(coming, tokens, whole)

    def check(self, case: Case) -> dict[str, Any]:
        """Return greedy tokens of some prompts, and the likeliest first tokens with their log-probabilities."""
        answers = []
        for prompt in self.prompts(case, case.seqs):
            self.add(prompt, case.new, logprobs=20)
            tokens, top = list[int](), list[list[float]]()
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if not tokens:
                        found = output.outputs[0].logprobs[0]
                        top = [[token, one.logprob] for token, one in found.items()]
                    tokens += output.outputs[0].token_ids
            answers.append({"tokens": tokens, "top": top})
        return {"answers": answers}


OPTIONS: dict[str, Any] = {}


def main() -> None:
    """Measure the cases of a plan."""
    cases, options = planned(sys.argv)
    OPTIONS.update(options)
    engine = Engine(cases, options)
    length = min(max(case.length for case in cases), 32768)
    engine.together([random_prompt(engine.vocabulary, length, WARM_SEED)], 4)
    engine.together([random_prompt(engine.vocabulary, 64, WARM_SEED + seed) for seed in range(4)], 8)
    emit("ready", about=engine.about)
    serve_cases(cases, engine.measure)
    sys.stdout.flush()
    os._exit(0)  # threads of the engine would be waited for


if __name__ == "__main__":
    main()
