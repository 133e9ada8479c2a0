"""How many candidates the codes must rank, on a pretrained model's own keys and queries, as contexts grow.

`python -m lab.candidates --model FILE.gguf --text FILE --layers 4,12,20 --own 4096,8192,16384,32768 --pooled 131072,1048576`.
The script cuts a text into pieces. A length in --own takes the keys of one piece of this length. A length in --pooled, beyond
the model's positions, takes the keys of several pieces of the longest own length. Queries are the last ones of the first piece.
A method keeps a piece's first 16 and last 512 tokens exactly or in a ring, so their keys are left out.

One JSON line a length and number of rows, means over layers, KV heads and queries. "exact" are the rows of the largest softmax
weight of any query head of a group, among the keys.

- needed: {share: candidates}: the first-stage rank within which this share of the exact rows lies, on average.
- mass: the share of the keys' attention, the mean of query heads, that the exact rows have.
- by_candidates: {candidates: [recall of the exact rows, mass of the rows that the codes choose among them]}.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.cache.index_api import IndexContext
from kvthaw.engine.hf.model import load, silence
from kvthaw.index.codes import CodesIndex
from kvthaw.kernels.collide import BINS, Scores
from kvthaw.kernels.planes import planes
from kvthaw.kernels.rerank import Estimates, rerank
from kvthaw.kernels.signs import signs
from kvthaw.regions import Regions
from lab.script import Report, options, run_as_script
from models.real_keys import watch

SINK, RING, QUERIES = 16, 512, 8
SHARES = (0.5, 0.9, 0.95, 0.99)
COUNTS = tuple(1 << n for n in range(8, 20))
Captured = tuple[Tensor, Tensor]
"""Keys [H, n, D] without sink and ring, and queries [QUERIES, Hq, D]."""


class Pieces:
    """Runs a model on pieces of a text and keeps what some layers attend with."""

    def __init__(self, name: str, text: str, layers: list[int], device: str | None) -> None:
        silence()
        self.model, tokenizer = load(name, device=device)
        self.ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], device=self.model.device)
        self.scale = 0.0
        self._found: dict[int, Captured] = {}
        watch(self.model, layers, self._see)

    def run(self, piece: int, tokens: int) -> dict[int, Captured]:
        """Return what the layers attend with in the n-th piece of `tokens` tokens."""
        ids = self.ids[piece * tokens : (piece + 1) * tokens]
        if len(ids) < tokens:
            raise SystemExit(f"the text has {len(self.ids)} tokens; {(piece + 1) * tokens} are needed")
        with torch.no_grad():
            self.model(ids[None], logits_to_keep=1, use_cache=False)
        return self._found

    def _see(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        self.scale = scale
        self._found[layer] = key[0, :, SINK:-RING].clone(), query[0, :, -QUERIES:].transpose(0, 1).clone()


def _scores(found: Scores | Estimates | Tensor) -> Tensor:
    return found if isinstance(found, Tensor) else found.scores


def measure(
    keys: Tensor, queries: Tensor, scale: float, rows: int
) -> Iterator[tuple[list[int], float, dict[int, list[float]]]]:
    """Yield, of each KV head and query, the first-stage ranks of the exact rows, their mass and what each number of candidates
    finds."""
    heads, n, dim = keys.shape
    group = queries.shape[1] // heads
    store, regions = HostStore(1, heads, dim, keys.dtype), Regions(0, 1, 1)
    context = IndexContext(0, heads * group, heads, dim, keys.dtype, keys.device, store, regions, scale)
    index = CodesIndex(context, graded=True, centre=True)
    index.make_room(1, n)
    index.build(0, 0, keys, keys, keys[:, :0])
    data, now = index.tables, index.summaries
    every = torch.arange(n, dtype=torch.int32, device=keys.device).expand(1, heads, -1)
    width = -(-n // 64) * 64
    every = torch.nn.functional.pad(every, (0, width - n), value=-1).contiguous()
    for query in queries[:, None]:
        totals = torch.empty((1, heads, BINS), dtype=torch.int32, device=keys.device)
        rotated, bits = planes(query.contiguous(), index.rotation, heads, totals, mean=False)
        votes = _scores(signs(bits, now.ids, data["lengths"], totals))[0, :, :n]
        codes = _scores(rerank(rotated, now, every, torch.full_like(data["lengths"], n), index.quantizer, scale))[0, ..., :n]
        logits = torch.einsum("hgd,hnd->hgn", query[0].unflatten(0, (heads, group)).float(), keys.float())
        exact, estimated = (torch.softmax(x * scale, dim=2) for x in (logits, codes))
        for head in range(heads):
            best = exact[head].amax(dim=0).topk(min(rows, n)).indices
            order = votes[head].int().argsort(descending=True, stable=True)
            rank = torch.empty_like(order).scatter_(0, order, torch.arange(n, device=keys.device))
            by = dict[int, list[float]]()
            for count in COUNTS:
                if rows <= count < 2 * n:
                    among = order[:count]
                    chosen = among[estimated[head].amax(dim=0)[among].topk(min(rows, len(among))).indices]
                    recall = torch.isin(best, chosen).float().mean()
                    by[count] = [float(recall), float(exact[head][:, chosen].sum(dim=1).mean())]
            yield sorted(rank[best].tolist()), float(exact[head][:, best].sum(dim=1).mean()), by


def main() -> None:
    """Measure, a JSON line a length and number of rows."""
    given = options(
        __doc__, model=str, text=Path, layers="4,12,20", own="4096,8192,16384,32768", pooled="", rows="64,256,1024", device=str,
        commit=str, out=Path,
    )  # fmt: skip
    layers, own, pooled, rows = (
        [int(one) for one in each.split(",") if one] for each in (given.layers, given.own, given.pooled, given.rows)
    )
    pieces, report = Pieces(given.model, given.text.read_text(), layers, given.device), Report(given.out, given.commit)
    about = {"model": Path(given.model).stem, "layers": layers}
    kept: dict[int, list[Tensor]] = defaultdict(list)
    for tokens in own + pooled:
        if tokens in own:
            found, last = dict(pieces.run(0, tokens)), tokens
        for layer in layers:
            kept[layer] = [found[layer][0]] if tokens in own else kept[layer]
        while sum(keys.shape[1] for keys in kept[layers[0]]) < tokens - SINK - RING:
            more = pieces.run(len(kept[layers[0]]), last)
            for layer in layers:
                kept[layer].append(more[layer][0])
        for count in rows:
            some = []
            for layer in layers:
                keys = torch.cat(kept[layer], dim=1)[:, : tokens - SINK - RING]
                some += list(measure(keys, found[layer][1], pieces.scale, count))
            needed = {share: round(fmean(ranks[int(share * (len(ranks) - 1))] + 1 for ranks, _, _ in some)) for share in SHARES}
            by = {n: [round(fmean(x), 4) for x in zip(*(one[n] for *_, one in some), strict=True)] for n in some[0][2]}
            line = {"tokens": tokens, "pieces": len(kept[layers[0]]), "rows": count, "heads": len(some) // QUERIES}
            report(
                {**about, **line, "needed": needed, "mass": round(fmean(mass for _, mass, _ in some), 4), "by_candidates": by}
            )


if __name__ == "__main__":
    run_as_script(main)
