"""Plans for figures that nothing else measures: what a layer selects, drifting centroids, layouts, kernels, regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvthaw.cache.plan import Settings
from kvthaw.engine.decode import feed
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import check_prompt
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.probe import exact_scores
from kvthaw.evaluate.results import Record, mean
from kvthaw.evaluate.variant import Variant, complete, fork, whole
from kvthaw.index.hybrid import HybridIndex
from kvthaw.kernels import kmeans
from kvthaw.methods import resolve
from lab.evaluate.published import BENCHMARKS
from lab.reproduce.experiment import Cell, Cells, Measurement
from lab.reproduce.lab import Lab
from lab.reproduce.plans import QUICK
from lab.reproduce.watched import DEPTH, View, prompts, written

Found = dict[str, dict[str, float]]
"""Row -> column -> number."""


@dataclass(frozen=True)
class Together:
    """Several plans side by side; each measures the rows named with it, or all."""

    parts: tuple[tuple[Measurement, tuple[str, ...]], ...]

    @property
    def needs(self) -> str:
        """What any of them needs."""
        return ", ".join(dict.fromkeys(word for plan, _ in self.parts for word in plan.needs.split(", ")))

    @property
    def benchmarks(self) -> list[str]:
        """Those of all."""
        return [name for plan, _ in self.parts for name in getattr(plan, "benchmarks", ())]

    @property
    def columns(self) -> list[str]:
        """Those of all."""
        return [name for plan, _ in self.parts for name in plan.columns]

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        found: Cells = {}
        for plan, mine in self.parts:
            own = [row for row in rows if not mine or row in mine]
            with lab.attempt(plan.columns):
                found |= plan.measure(lab, own) if own else {}
        return found


@dataclass(frozen=True)
class Special:
    """A function of its own.

    settings: what it is given besides lab and rows, part of what a result depends on.
    """

    of: Callable[..., tuple[Found, str]]
    columns: tuple[str, ...]
    needs: str
    settings: dict[str, Any] = field(default_factory=dict)
    weights: bool = True

    @property
    def benchmarks(self) -> list[str]:
        """The benchmark whose questions are the prompts, if they are one's."""
        source = self.settings.get("source")
        prompt = source.prompt if isinstance(source, View) else self.settings.get("prompt")
        return [prompt] if prompt in BENCHMARKS else []

    def measure(self, lab: Lab, rows: Sequence[str]) -> Cells:
        about = lab.same if self.weights else {"device": lab.timed_on}
        setting = {**about, "special": self.of.__name__, "rows": list(rows), "quick": lab.quick, "method": ""}
        setting |= {name: str(value) for name, value in self.settings.items()}
        record = lab.results.get(setting)
        if record is None and lab.known is not None:
            return {}
        if record is None:
            before = len(lab.left_out)
            found, on = self.of(lab, rows, **self.settings)
            record = Record(setting, {"found": found, "on": on})
            if len(lab.left_out) == before:  # a later run measures what this one could not
                lab.results.add(record)
        on = f"{lab.on if self.weights else lab.timed_on}, {record['on']}"
        return {(row, c): Cell(value, on) for row, of in record["found"].items() for c, value in of.items()}


def regions(lab: Lab, rows: Sequence[str], methods: dict[str, tuple[str, str]]) -> tuple[Found, str]:
    """Return what a cache keeps with the settings of a row: window, buffer, threshold; and its benchmark's longest answer."""
    found: Found = {}
    for row in rows:
        written, benchmark = methods[row]
        kept = Settings(resolve(written), retrieved=100).plan(131072).regions
        threshold = int(written.partition("full_threshold=")[2])
        found[row] = {"local": kept.window, "update": kept.buffer, "full-threshold": threshold}
        if benchmark in BENCHMARKS:
            found[row]["longest"] = BENCHMARKS[benchmark].generation.max_new_tokens
    return found, "a cache's regions at 128k; the benchmarks' own longest answer"


def _chosen(lab: Lab, source: View, variants: Sequence[Variant]) -> list[list[tuple[int, Tensor, Tensor]]]:
    """Return, a variant, (length, exact weights [H, T], chosen rows [H, M]) of every step of one layer."""
    model = lab.loaded[0]
    prompt, rest = next(prompts(lab, source, 1))
    base = whole(model, variants)
    logits = prefill(model, base, prompt)
    rest = rest or written(lab, base, logits, source.steps)
    found = []
    for variant in variants:
        cache, seen = fork(base, complete(model, variant)), list[tuple[int, Tensor, Tensor]]()
        layers = cache.kv.offloaded
        layer = min(layers, key=lambda one: abs(one.number - (source.layer or 0) * len(cache.layers) / DEPTH))

        def look(kv: Any, query: Tensor, choice: Any, seen: list[Any] = seen, layer: Any = layer) -> None:
            if kv is not layer:
                return
            scores = exact_scores(kv, query[0], [kv.read(0, 0, kv.length(0)).to(query.device)])
            seen.append((kv.length(0), torch.softmax(scores, dim=2).amax(dim=1).cpu(), choice.selection.rows[0].cpu()))

        cache.kv.streams.observers.append(look)
        for _ in feed(model, cache, rest):
            pass
        found.append(seen)
    return found


def ranks(lab: Lab, rows: Sequence[str], source: View, steps: tuple[int, ...]) -> tuple[Found, str]:
    """Return the rank of single tokens, by attention weight in one head, at steps; and how many of the best 1,024 a page of 16
    holds that holds any.

    rows: "token-N" of a prompt of source.length, and "page-16".
    """
    small = View("text", QUICK // 2, 8, layer=source.layer) if lab.quick else source
    (seen,) = _chosen(lab, small, [lab.variant("oracle:retrieved=1024")])
    found: Found = {row: {} for row in rows}
    for at in steps:
        weights = seen[min(at * len(seen) // (max(steps) + 1), len(seen) - 1)][1]
        for row in rows:
            kind, _, number = row.partition("-")
            if kind == "token":
                place = int(number) * small.length // source.length
                found[row][str(at)] = float((weights[0] > weights[0, place]).sum()) * source.length / small.length
            else:
                best = torch.topk(weights, 1024 * small.length // source.length, dim=1).indices // 16
                held = [torch.bincount(head) for head in best]
                found[row][str(at)] = float(torch.cat([counts[counts > 0] for counts in held]).float().mean())
    return found, f"{small.prompt}, {small.length:,} tokens, layer {small.layer} of {DEPTH}"


def spread(lab: Lab, rows: Sequence[str], source: View, step: int) -> tuple[Found, str]:
    """Return which shares of a selection lie in each tenth of the sequence, and how much of the first row's selection each has."""
    small = View("text", QUICK // 2, 4, layer=source.layer) if lab.quick else source
    seen = [each[min(step, len(each) - 1)] for each in _chosen(lab, small, [lab.variant(row) for row in rows])]
    truth = [set(head[head >= 0].tolist()) for head in seen[0][2]]
    found: Found = {}
    for row, (length, _, chosen) in zip(rows, seen, strict=True):
        places = chosen[chosen >= 0]
        share = torch.bincount(places * 10 // length, minlength=10)[:10] / max(1, len(places))
        both = mean(len(a & set(head.tolist())) / max(1, len(a)) for a, head in zip(truth, chosen, strict=True))
        found[row] = {**{f"{10 * i}%": 100 * float(value) for i, value in enumerate(share)}, "of-truth": 100 * (both or 0.0)}
    return found, f"{small.prompt}, {small.length:,} tokens, layer {small.layer} of {DEPTH}, step {step}"


def drifted(lab: Lab, rows: Sequence[str], source: View) -> tuple[Found, str]:
    """Return how far generated keys are from their nearest centroid, 1 - cosine, a mean over layers: of centroids of the prompt's
    keys alone (the first row), and of all keys (the second); a centroid for 80 keys."""
    model, small = lab.loaded[0], View("text", QUICK // 2, 32) if lab.quick else source
    prompt, rest = next(prompts(lab, small, 1))
    cache = Cache(model, "full")
    logits = prefill(model, cache, prompt)
    for _ in feed(model, cache, rest or written(lab, cache, logits, small.steps)):
        pass
    far: dict[str, list[float]] = {row: [] for row in rows}
    for layer in cache.kv.layers:
        keys = layer.read(0, 0, layer.length(0))[:, :, 0].to(model.device).float()
        made = torch.nn.functional.normalize(keys[:, len(prompt) :], dim=2)
        for row, known in zip(rows, (keys[:, : len(prompt)], keys), strict=True):
            generator = torch.Generator().manual_seed(layer.number)
            start = torch.randperm(known.shape[1], generator=generator)[: max(2, len(prompt) // 80)].to(keys.device)
            starts = start.expand(keys.shape[0], -1).contiguous()
            means, _, _ = kmeans.whole(kmeans.kmeans_in_pieces(known.contiguous(), starts, distance="cosine", iterations=20))
            nearest = (made @ torch.nn.functional.normalize(means.float(), dim=2).transpose(1, 2)).amax(dim=2)
            far[row].append(float(1 - nearest.mean()))
    return {row: {"distance": mean(of) or 0.0} for row, of in far.items()}, f"{small.length:,} + {small.steps:,} tokens"


def shares(lab: Lab, rows: Sequence[str], lengths: dict[str, int], prompt: str, samples: int) -> tuple[Found, str]:
    """Return PRKV's automatic static share (appendix G) of each number of rows, a mean over prompts and layers."""
    model, means = lab.loaded[0], {row: dict[str, float]() for row in rows}
    for column, length in lengths.items():
        view = View("text", QUICK, 1) if lab.quick else View(prompt, length, 1)
        found: dict[str, list[float]] = {row: [] for row in rows}
        with lab.attempt([column]):
            for tokens, _ in prompts(lab, view, 1 if lab.quick else lab.limit or samples):
                check_prompt(model, len(tokens))
                base = whole(model, [Variant("prkv:share=auto")])
                prefill(model, base, tokens)
                for row in rows:
                    count = int(row.rpartition("=")[2])
                    known = static_shares(base, "prkv:share=auto", max(32, count // 16) if lab.quick else count)
                    found[row].extend(known.values())
            for row, values in found.items():
                means[row][column] = mean(values) or 0.0
    return means, f"{'the book that ships' if lab.quick else prompt}, n={1 if lab.quick else lab.limit or samples}"


def static_shares(base: Cache, method: str, count: int) -> dict[int, float]:
    """Return the automatic static share of each layer that retrieves `count` of a cache's tokens."""
    cache = base.fork(method, retrieved=count)
    cache.wait()
    indexes = {layer.number: layer.retriever.index for layer in cache.kv.offloaded if layer.retriever is not None}
    known = {n: index.statics[0].share for n, index in indexes.items() if isinstance(index, HybridIndex) and index.statics}
    return {number: share for number, share in known.items() if share is not None}
