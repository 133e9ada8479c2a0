"""How many tokens of a prompt a step takes, by how deep in the prompt they are."""

from __future__ import annotations

from kvthaw.engine.batch import Batch
from kvthaw.engine.hf.model import attention_depth
from kvthaw.engine.request import Request

STEP_TOKENS = 4096
"""Tokens that one step processes on a GPU while other requests decode."""
CPU_WORK = 1 << 38
"""Multiplications that a CPU does in about a second. A server does more, a laptop fewer."""
CPU_STEP, CPU_LEAST = 64, 32
"""Tokens that one step processes on a CPU while other requests decode, and the smallest chunk.

A token takes no longer in chunks of 32 than in chunks of 512.
"""
YIELDS = 4
"""How many times smaller the chunks of a client are while another one with less service decodes, which waits for each of them.

Less means by more than such a chunk. On a CPU it is also the number of steps from one chunk to the next, for each such client.
"""
DEPTH = 32768
"""Earlier tokens whose attention takes about the time of a token's other work, for an 8B model on an H200: 0.89 ns each, and
29 us."""
STREAMED = 2048
"""The smallest chunk if the KV before it comes over the bus."""
BUS = 2800
"""Chunk length at which attention to an earlier token hides the transfer of that token's KV, for an 8B model on an H200.

Attention takes 0.79 ns per token of the chunk. 131 kB in all layers at 52.6 GB/s take as long as 3,150 tokens. A tenth less
is used, because a step has other work too.
"""
_FEW = 512
"""Longer chunks are multiples of this: powers of two or 3/2 of one, because attention has plans for few lengths, see
kvthaw.kernels.dense.

Other lengths would take as long as the next multiple. The tiles of this many queries of 32 heads, 128 queries each, fill a
GPU of 132 multiprocessors once.
"""


class ChunkLengths:
    """The lengths of the chunks of a batch's prompts.

    step_tokens: see Scheduler.
    step: about the tokens of a step at the start of a prompt, while other requests decode.
    alone: the same while none decodes; None on a GPU: the batch's `prefill_chunk`.
    """

    def __init__(self, batch: Batch, step_tokens: int | None) -> None:
        self._batch, model = batch, batch.model
        self.alone = cpu_tokens(model.num_parameters()) if model.device.type == "cpu" else None
        self.step = step_tokens or (STEP_TOKENS if self.alone is None else CPU_STEP)
        split = batch.cache.kv.settings.ranks.size > 1  # ranks may hold different numbers of weights
        own = self.alone is not None and step_tokens is None and not split
        self._depth = attention_depth(model) if own else None  # this model's own depth

    def next(self, request: Request, decoded: int, *, yields: bool) -> int | None:
        """Return the length of the next chunk of a prompt; None: the batch's chunk.

        decoded: number of tokens that the step decodes.
        yields: a client with less service decodes, or did in the step before.
        """
        if self.alone is not None and self._depth is not None:
            tokens = self.step if decoded else self.alone
            if yields:
                tokens = self.step // YIELDS
            return max(CPU_LEAST, int(tokens / (1 + request.prefilled / self._depth)))
        if not decoded:
            return None if self.alone is None else chunk_tokens(self.alone, request.prefilled)
        tokens, left = chunk_tokens(self.step, request.prefilled, decoded), request.prompt - request.prefilled
        if yields:
            tokens = max(
                tokens // YIELDS, min(tokens, CPU_LEAST), request.prompt if self._batch.prompts.replays(request) else 0
            )
        if self.streams_back(request):
            return max(tokens, streamed_tokens(request.prefilled))
        deep = request.prefilled > DEPTH and _FEW < left < tokens  # attention without a plan takes 1.5 times as long
        return 1 << (left.bit_length() - 1) if deep else tokens

    def streams_back(self, request: Request) -> bool:
        """Return whether the next chunk of a prompt may read earlier KV over the bus."""
        kv, cuda = self._batch.cache.kv, self._batch.model.device.type == "cuda"
        split = kv.settings.ranks.size > 1  # where blocks lie may differ between processes
        stores = [layer.store for layer in kv.allocated if cuda]
        return any(split or not block.on_device for store in stores for block in store.blocks(request.seq))


def work(depth: int) -> float:
    """Return the time of a token after `depth` earlier ones, as a multiple of the first token's."""
    return 1 + depth / DEPTH


def cpu_tokens(weights: int) -> int:
    """Return how many tokens a CPU processes in about a second, as a power of two from 128 to 512.

    With fewer tokens, reading the weights would take longer than the products. More would save little.

    weights: number of weights.
    """
    return min(512, max(128, 1 << (max(1, CPU_WORK // weights).bit_length() - 1)))


def chunk_tokens(step_tokens: int, depth: int, decoded: int = 0) -> int:
    """Return the length of a chunk that takes at most the time of the first `step_tokens` tokens of a prompt.

    Long chunks are rounded down to few lengths.

    depth: tokens of the prompt before the chunk.
    decoded: tokens that the step decodes. They are subtracted if step_tokens is at most _FEW.
    """
    if step_tokens <= _FEW:
        return max(1, round((step_tokens - decoded) / work(depth)))
    left = max(_FEW, int(step_tokens / work(depth)))
    return left - left % max(_FEW, 1 << (left.bit_length() - 2))


def streamed_tokens(depth: int) -> int:
    """Return the chunk length, after `depth` earlier tokens, whose attention takes as long as the transfer of their KV."""
    return max(STREAMED, round(BUS * depth / (depth + DEPTH) / _FEW) * _FEW)
