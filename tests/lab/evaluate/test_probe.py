"""The probe against a slow, independent computation in float64."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache.choice import Choice
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.errors import ConfigError
from kvthaw.kernels.merge import Partial
from lab.evaluate.probe import Observation, Probe, Quality, observe
from zoo import VOCAB

Step = tuple[OffloadedLayer, Tensor, Choice | None, list[Tensor], list[int]]


def watch(cache: kvthaw.Cache, probe: Probe) -> list[Step]:
    """Keep what every step of every layer had, beside what the probe makes of it: each sequence's rows [H, n, 2, D] and ring."""
    steps: list[Step] = []

    def keep(layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
        rows = [layer.read(seq, 0, layer.length(seq)).clone() for seq in range(layer.sequences.count)]
        steps.append((layer, query.clone(), choice, rows, [layer.indexed(seq) for seq in range(layer.sequences.count)]))

    cache.kv.streams.observers.append(keep)
    return steps


def slow(
    layer: OffloadedLayer, seq: int, query: Tensor, choice: Choice | None, rows: Tensor, ring: int
) -> tuple[list[float], list[float], list[float]]:
    """Attention mass and output error of every query head, recall of every KV head; loops over everything, float64."""
    assert layer.plan is not None
    q_heads, dim = query.shape
    heads, n = rows.shape[:2]
    group, sink = q_heads // heads, layer.plan.regions.sink
    held = set(range(min(sink, n))) | set(range(ring, n))
    mass, errors, recalls = [], [], []
    for head in range(heads):
        chosen = [] if choice is None else [int(row) for row in choice.selection.rows[seq, head] if row >= 0]
        regional: list[list[float]] = []
        for g in range(group):
            q = query[head * group + g].double()
            scores = [float(q @ rows[head, t, 0].double()) * layer.scale for t in range(n)]
            weights = [math.exp(score - max(scores)) for score in scores]
            total = sum(weights)
            seen = held | set(chosen)
            mass.append(sum(weights[t] for t in seen) / total)
            full = sum((weights[t] / total * rows[head, t, 1].double() for t in range(n)), torch.zeros(dim).double())
            part = sum(weights[t] for t in seen)
            thin = sum((weights[t] / part * rows[head, t, 1].double() for t in seen), torch.zeros(dim).double())
            errors.append(float((thin - full).norm() / full.norm()))
            inner = sum(weights[sink:ring])
            regional.append([weight / inner for weight in weights[sink:ring]])
        if not chosen:
            recalls.append(math.nan)
            continue
        best = [max(of) for of in zip(*regional, strict=True)]
        top = set(sorted(range(len(best)), key=lambda t: -best[t])[: len(chosen)])
        recalls.append(sum(row - sink in top for row in chosen) / len(chosen))
    return mass, recalls, errors


def decode(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor, steps: int, mask: Tensor | None = None) -> None:
    with torch.no_grad():
        for _ in range(steps):
            ids = model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits[:, -1:].argmax(-1)
            if mask is not None:
                mask = torch.cat((mask, mask.new_ones(mask.shape[0], 1)), dim=1)


@pytest.mark.parametrize("method", ["oracle", "streaming", "full"])
def test_probe_equals_slow_computation(llama: PreTrainedModel, method: str) -> None:
    ids = torch.randint(0, VOCAB, (1, 90))
    base = kvthaw.Cache(llama, "full", dense_layers=0)
    decode(llama, base, ids, 1)
    cache = base.fork(method, budget=32)
    probe = Probe(cache, reference=base)
    steps = watch(cache, probe)
    decode(llama, cache, ids[:, -1:], 4)
    if method == "full":
        assert probe.quality().observed == 0
        assert probe.quality().attention_mass is None
        return
    assert len(probe.observations) == len(steps) == 4 * 2
    for seen, (layer, query, choice, rows, ring) in zip(probe.observations, steps, strict=True):
        whole = rows[0]

        mass, recall, error = slow(layer, 0, query[0], choice, whole, ring[0])
        assert seen.length == whole.shape[1]
        torch.testing.assert_close(seen.attention_mass, torch.tensor(mass), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.recall_at_k, torch.tensor(recall), equal_nan=True)
        torch.testing.assert_close(seen.output_error, torch.tensor(error), atol=1e-4, rtol=1e-3)
    quality = probe.quality()
    assert quality.attention_mass is not None
    assert 0 < quality.attention_mass < 1
    assert quality.recall_at_k == (1.0 if method == "oracle" else None)
    assert probe.seconds > 0


def test_rows_of_a_batch_have_their_own_lengths(llama: PreTrainedModel) -> None:
    ids, mask = torch.randint(0, VOCAB, (2, 70)), torch.ones(2, 70, dtype=torch.long)
    mask[1, :23] = 0
    cache = kvthaw.Cache(llama, "oracle", budget=32, dense_layers=0)
    probe = Probe(cache)
    steps = watch(cache, probe)
    decode(llama, cache, ids, 3, mask)
    assert len(probe.observations) == 2 * len(steps) == 2 * 2 * 2
    for i, seen in enumerate(probe.observations):
        layer, query, choice, rows, ring = steps[i // 2]
        seq = i % 2
        assert (seen.seq, seen.length) == (seq, rows[seq].shape[1])
        mass, recall, _ = slow(layer, seq, query[seq], choice, rows[seq], ring[seq])
        torch.testing.assert_close(seen.attention_mass, torch.tensor(mass), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(seen.recall_at_k, torch.tensor(recall), equal_nan=True)


def test_weights_and_partials_count(llama: PreTrainedModel) -> None:
    """A head that did not draw a row does not cover it; a partial over everything else makes the output whole again."""
    ids = torch.randint(0, VOCAB, (1, 60))
    cache = kvthaw.Cache(llama, "oracle", budget=32, dense_layers=0)
    steps = watch(cache, Probe(cache))
    decode(llama, cache, ids, 2)
    layer, query, choice, rows, ring = steps[0]
    assert choice is not None
    assert layer.plan is not None
    m, sink = choice.selection.rows.shape[2], layer.plan.regions.sink
    weight = torch.zeros(1, 4, m)
    weight[:, 0] = -torch.inf
    weighted = replace(choice, selection=replace(choice.selection, log_weight=weight))
    plain = observe(layer, 0, query[0], choice, [rows[0]])
    some = observe(layer, 0, query[0], weighted, [rows[0]])
    held = slow(layer, 0, query[0], None, rows[0], ring[0])[0]
    assert float(some.attention_mass[0]) == pytest.approx(held[0], rel=1e-4)
    torch.testing.assert_close(some.attention_mass[1:], plain.attention_mass[1:])

    outs, lses = torch.zeros(1, 4, rows[0].shape[3]), torch.zeros(1, 4)
    for head in range(4):
        kv = head // 2
        seen = set(range(sink)) | set(range(ring[0], rows[0].shape[1])) | set(choice.selection.rows[0, kv].tolist())
        rest = [t for t in range(rows[0].shape[1]) if t not in seen]
        scores = rows[0][kv, rest, 0] @ query[0, head] * layer.scale
        outs[0, head], lses[0, head] = torch.softmax(scores, 0) @ rows[0][kv, rest, 1], torch.logsumexp(scores, 0)
    whole = replace(choice, selection=replace(choice.selection, partial=Partial(outs, lses)))
    assert float(observe(layer, 0, query[0], whole, [rows[0]]).output_error.max()) < 1e-4
    assert float(plain.output_error.max()) > 1e-3


def test_every_nth_step_and_detach(llama: PreTrainedModel) -> None:
    ids = torch.randint(0, VOCAB, (1, 60))
    cache = kvthaw.Cache(llama, "oracle", budget=32, dense_layers=0)
    probe = Probe(cache, every=3)
    decode(llama, cache, ids, 1)
    decode(llama, cache, ids[:, :1], 7)
    assert [o.length for o in probe.observations if o.layer == 0] == [61, 64, 67]
    probe.detach()
    decode(llama, cache, ids[:, :1], 5)
    assert len(probe.observations) == 6
    with pytest.raises(ConfigError, match="every is 0"):
        Probe(cache, every=0)


def observed(model: PreTrainedModel, method: str, **settings: int) -> list[Observation]:
    """What six steps after a prompt of 200 tokens show, every observation."""
    cache = kvthaw.Cache(model, method, dense_layers=0, **settings)
    probe = Probe(cache)
    decode(model, cache, torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(5)), 7)
    return probe.observations


def test_exact_mass_is_what_the_exact_rows_cover(llama: PreTrainedModel) -> None:
    for seen in observed(llama, "oracle", budget=64):
        torch.testing.assert_close(seen.exact_mass, seen.attention_mass)
        assert seen.recall_at_rows.tolist() == [1.0, 1.0]
        assert (seen.held_mass < seen.attention_mass).all()
        assert seen.ceiling.isnan().all()
        assert seen.ceiling_mass.isnan().all()


def test_fewer_rows_than_asked_lower_recall_at_rows(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", retrieved=12, dense_layers=0)
    steps = watch(cache, Probe(cache))
    decode(llama, cache, torch.randint(0, VOCAB, (1, 90)), 2)
    layer, query, choice, rows, _ = steps[0]
    assert choice is not None
    half = choice.selection.rows.clone()
    best = observe(layer, 0, query[0], choice, [rows[0]])
    half[:, :, 6:] = -1
    seen = observe(layer, 0, query[0], replace(choice, selection=replace(choice.selection, rows=half)), [rows[0]])
    assert seen.rows.tolist() == [6, 6]
    assert seen.recall_at_rows.tolist() == [0.5, 0.5]
    torch.testing.assert_close(seen.exact_mass, best.attention_mass)


def test_the_ceiling_is_that_of_the_candidates(llama: PreTrainedModel) -> None:
    """All are candidates: no loss. As many candidates as rows: the candidates are the rows. Else it lies between."""
    for seen in observed(llama, "pariskv:rho=1.0:beta=1.0:window=16:buffer=16", retrieved=10):
        assert seen.ceiling.tolist() == [1.0, 1.0]
        torch.testing.assert_close(seen.ceiling_mass, seen.exact_mass)
    for seen in observed(llama, "pariskv:candidates=10:window=16:buffer=16", retrieved=10):
        torch.testing.assert_close(seen.ceiling, seen.recall_at_rows)
        torch.testing.assert_close(seen.ceiling_mass, seen.attention_mass)
    between = observed(llama, "pariskv:beta=0.2:rho=0.5:window=16:buffer=16", retrieved=4)
    assert all((seen.recall_at_rows <= seen.ceiling).all() for seen in between)
    assert any((seen.recall_at_rows < seen.ceiling).any() for seen in between)


def test_observing_changes_no_choice(llama: PreTrainedModel) -> None:
    ids = torch.randint(0, VOCAB, (1, 120))

    def rows(probed: bool) -> list[Tensor]:
        found: list[Tensor] = []
        cache = kvthaw.Cache(llama, "pariskv:beta=0.3:rho=0.3:window=8:buffer=8", retrieved=6, dense_layers=0)

        def keep(layer: OffloadedLayer, query: Tensor, choice: Choice | None) -> None:
            assert choice is not None
            found.append(choice.selection.rows.clone())

        cache.kv.streams.observers.append(keep)
        if probed:
            Probe(cache)
        decode(llama, cache, ids, 20)
        return found

    plain = rows(False)
    assert len(plain) == 19 * 2
    assert all(torch.equal(a, b) for a, b in zip(plain, rows(True), strict=True))


def test_quality_pools_by_how_much_was_observed(llama: PreTrainedModel) -> None:
    seen = observed(llama, "pariskv:window=16:buffer=16", retrieved=10)
    whole, parts = Quality.of(seen), Quality.pooled([Quality.of(seen[:5]), Quality.of(seen[5:]), Quality.of([])])
    assert asdict(whole) == pytest.approx(asdict(parts))
