"""Trains the model that ships: answers to questions about long contexts, and some plain text.

    python models/train.py --data FOLDER --plan 512:90,2048:150,8192:150,32768:60 --out OUT [--resume STATE] [--save STATE]

The plan is phases of LENGTH[+LENGTH..]:SECONDS. FOLDER is what models/prepare.py wrote. Prints the loss, the share of
whole answers right by task, and at the end the evaluation: an answer counts if every one of its tokens is the likeliest.
"""

import argparse
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data import Batch, batches
from facts import TASK_NAMES, Pieces
from llama import Llama, Shape, save_shards

ANSWERS, TEXTS = 24576, 8192


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Batches of one length from the worker's own seed."""

    def __init__(self, pieces: Pieces, length: int, tokens: int, seed: str, scale: int) -> None:
        self.args = (pieces, length, tokens, seed)
        self.sizes = (ANSWERS // scale, TEXTS // scale)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        return batches(*self.args, info.id if info else 0, *self.sizes)


def as_tensors(items: list[Batch]) -> tuple[Tensor, ...]:
    b = items[0]
    return tuple(torch.from_numpy(x.astype(np.int64)) for x in (b.ids, b.answer, b.group, b.task, b.text))


def orthogonal(g: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices of a stack, by Newton-Schulz (Jordan et al., 2024)."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal, for stacked matrices, scaled to the size of AdamW's steps (Liu et al., 2025)."""

    def __init__(self, params: list[Tensor], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(m, 0.95))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))


def optimizers(model: Llama, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [model.wq, model.wk, model.wv, model.wo, model.wg, model.wu, model.wd]
    fused = model.embed.is_cuda
    rest = [{"params": [model.embed], "lr": lr}, {"params": [model.n1, model.n2, model.norm], "lr": lr}]
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return [Muon(matrices, lr, 0.05), adam]


class Meter:
    """Sums kept on the device between two lines of the log."""

    def __init__(self, device: str) -> None:
        n = len(TASK_NAMES)
        self.right, self.total = torch.zeros(n, device=device), torch.zeros(n, device=device)
        self.loss = torch.zeros(2, device=device)
        self.tokens = self.steps = 0
        self.start = time.time()

    def add(self, ok: Tensor, kept: Tensor, group: Tensor, task: Tensor, losses: Tensor, tokens: int) -> None:
        whole = torch.ones(len(group), device=group.device).scatter_reduce(0, group, (ok | ~kept).float(), "amin")
        first = torch.zeros(len(group), dtype=torch.bool, device=group.device)
        kinds = torch.zeros_like(group).scatter(0, group, task * kept)
        first.scatter_(0, group, True)
        first[-1] = False
        self.total += torch.zeros_like(self.total).scatter_add(0, kinds, first.float())
        self.right += torch.zeros_like(self.total).scatter_add(0, kinds, whole * first)
        self.loss += losses
        self.tokens += tokens
        self.steps += 1

    def line(self) -> str:
        rate = self.tokens / (time.time() - self.start) / 1e6
        a, t = (self.loss / max(1, self.steps)).tolist()
        shares = (self.right / self.total.clamp(min=1)).tolist()
        tasks = " ".join(f"{n} {s * 100:.0f}" for n, s in zip(TASK_NAMES, shares, strict=True))
        return f"{rate:.2f}M/s answer {a:.3f} text {t:.3f} | {tasks}"


def losses(model: Llama, ids: Tensor, answer: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(answer loss, text loss) means, and which answer tokens are right."""
    flat = ids.flatten()
    x = model(ids)
    out = []
    right = answer
    for i, at in enumerate((answer, text)):
        loss, ok = model.head(x[(at - 1).clamp(min=0)], model.norm, model.embed, flat[at], model.shape.eps)
        kept = at > 0
        out.append((loss * kept).sum() / kept.sum().clamp(min=1))
        right = ok if i == 0 else right
    return out[0], out[1], right


@torch.no_grad()
def evaluate(model: Llama, file: Path, device: str, tokens: int, most: int, until: float) -> dict[str, dict[int, float]]:
    """The share of samples whose whole answer is the model's greedy one, by name and length."""
    if not file.exists():
        return {}
    with np.load(file) as archive:
        data = {name: archive[name] for name in archive.files}
    ends = np.cumsum(data["sizes"])
    by: dict[int, list[int]] = defaultdict(list)
    for i, size in enumerate(data["sizes"].tolist()):
        pad = max(1024, 1 << (size - 1).bit_length())
        if pad <= most:
            by[pad].append(i)
    got: dict[tuple[str, int], list[float]] = defaultdict(list)
    for pad, items in sorted(by.items()):
        rows = max(1, tokens // pad)
        for at in range(0, len(items), rows):
            if time.time() > until:
                print("evaluation cut short", flush=True)
                break
            chunk = items[at : at + rows]
            ids = np.zeros((rows, pad), np.int64)
            answer = np.zeros(ANSWERS * tokens // 131072, np.int64)
            group = np.zeros_like(answer)
            used = 0
            for r, i in enumerate(chunk):
                row = data["ids"][ends[i] - data["sizes"][i] : ends[i]]
                ids[r, : len(row)] = row
                n = int(data["answers"][i])
                answer[used : used + n] = np.arange(len(row) - n, len(row)) + r * pad
                group[used : used + n] = r
                used += n
            t = torch.from_numpy(ids).to(device)
            a = torch.from_numpy(answer).to(device)
            x = model(t)
            _, ok = model.head(x[(a - 1).clamp(min=0)], model.norm, model.embed, t.flatten()[a], model.shape.eps)
            good = ok.cpu().numpy()[:used]
            for r, i in enumerate(chunk):
                got[str(data["names"][i]), int(data["lengths"][i])].append(float(good[group[:used] == r].all()))
    table: dict[str, dict[int, float]] = defaultdict(dict)
    for (name, length), scores in sorted(got.items()):
        table[name][length] = sum(scores) / len(scores)
    for name, row in table.items():
        print(f"  {name:24}" + "  ".join(f"{n if n else 'file'}: {s * 100:5.1f}" for n, s in row.items()), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parents[1] / "src/kvthaw/assets/model/tokenizer.json")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path, help="a state that --save wrote, or a folder of safetensors")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=150)
    parser.add_argument("--end", type=float, default=1.0, help="the rate at the end, as a share; falls linearly over --fall")
    parser.add_argument("--fall", type=float, default=0.5, help="the share of the time over which it falls")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--eval-most", type=int, default=131072)
    parser.add_argument("--eval-seconds", type=float, default=60)
    parser.add_argument("--steps", type=int, default=10**9, help="stop every phase after so many steps (for a trial)")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    pieces = Pieces(args.data, args.tokenizer)
    model = Llama(Shape(vocab=pieces.size), compiled=device == "cuda").to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {device}", flush=True)
    opts = optimizers(model, args.lr)
    if args.resume and args.resume.is_dir():
        model.load_hf(args.resume)
    elif args.resume:
        state = torch.load(args.resume, map_location=device)
        model.load_state_dict(state["model"])
        for opt, s in zip(opts, state["opts"], strict=True):
            opt.load_state_dict(s)
    scale = max(1, 131072 // args.tokens)
    phases = [([int(n) for n in a.split("+")], float(b)) for a, b in (part.split(":") for part in args.plan.split(","))]
    whole = sum(seconds for _, seconds in phases)
    done = step = 0
    rng = random.Random(args.seed)
    lengths = sorted({n for ns, _ in phases for n in ns})

    def loader(n: int) -> Iterator[tuple[Tensor, ...]]:
        stream = Stream(pieces, n, args.tokens, args.seed, scale)
        few = max(1, args.workers // (2 if len(lengths) > 2 else 1))
        pin = device == "cuda"
        return iter(DataLoader(stream, 1, collate_fn=as_tensors, num_workers=few, prefetch_factor=4, pin_memory=pin))

    sources: dict[int, Iterator[tuple[Tensor, ...]]] = {}
    for ns, seconds in phases:
        for n in list(sources):
            if n not in ns:
                del sources[n]
        for n in ns:
            sources.setdefault(n, loader(n))
        begun, meter, last, tried = time.time(), Meter(device), time.time(), 0
        while time.time() - begun < seconds and tried < args.steps:
            ids, answer, group, task, text = (x.to(device, non_blocking=True) for x in next(sources[rng.choice(ns)]))
            gone = (done + time.time() - begun) / whole
            share = min(1.0, (step + 1) / args.warmup)
            if args.end < 1:
                share *= 1 - (1 - args.end) * max(0.0, min(1.0, (gone - 1 + args.fall) / args.fall))
            for opt in opts:
                for g in opt.param_groups:
                    g["lr"] = args.lr * share
            a, t, ok = losses(model, ids, answer, text)
            (a + 0.3 * t).backward()
            torch.nn.utils.clip_grad_norm_([model.embed], 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            meter.add(ok, answer > 0, group, task, torch.stack((a, t)).detach(), ids.numel())
            step, tried = step + 1, tried + 1
            if step == 1:
                meter = Meter(device)  # the first step compiles
            if time.time() - last > (10 if tried > 30 else 5):
                print(
                    f"{ns} {done + time.time() - begun:5.0f}s step {step} lr {args.lr * share:.1e} {meter.line()}", flush=True
                )
                meter, last = Meter(device), time.time()
        done += seconds
    sources.clear()
    weight_map = save_shards(model.hf_state(), args.out)
    (args.out / "weight_map.json").write_text(json.dumps(weight_map))
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "opts": [o.state_dict() for o in opts]}, args.save)
    table = evaluate(model, args.data / "eval.npz", device, args.tokens, args.eval_most, time.time() + args.eval_seconds)
    (args.out / "scores.json").write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
