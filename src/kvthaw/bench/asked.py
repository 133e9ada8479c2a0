"""What `kvthaw bench decode`, `figures`, `prefill`, `indexing` and `serving` can be asked for. Brings no torch with it, so that
--help answers at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvthaw.bench.options import BUDGET, FILE, FLAG, INTEGER, SHARE, WORD, at_least, many, option
from kvthaw.bench.shapes import SHAPES

FIGURES = {
    "length": "Time per output token against the length, 36k to 1M",
    "icecache": "IceCache's ways to search at 36k and 128k",
    "baseline": "After a prompt of 36k: transformers' caches, full attention, and methods, eager and captured",
    "text": "Rows that real text chooses, at 36k and 128k",
    "throughput": "Tokens a second against the batch at 128k",
    "clusterkv-ratio": "Latency and throughput beside full attention at 32k (ClusterKV's headline)",
    "clusterkv-latency": "Prompts of 8k to 32k and 256 to 1024 tokens, R = 0, 1, 2 (ClusterKV, figure 12)",
    "prkv-latency": "32k + 512 and 400 + 16k tokens (PRKV, figure 7)",
    "icecache-memory": "Device memory against time a token at 36k (IceCache, figure 1)",
    "pariskv-batches": "64k to 384k tokens by batch (ParisKV, figures 7 and 11)",
    "icecache-scaling": "150k to 300k tokens (IceCache, figure 8)",
}
"""Name -> what it shows and where it comes from."""


@dataclass(frozen=True, kw_only=True)
class Decode:
    """What `kvthaw bench decode` can be asked for."""

    shape: str = option("tiny", f"The model's shape, with random weights: {', '.join(SHAPES)}.", WORD)
    length: tuple[int, ...] = option((4096,), "Prompt lengths in tokens, separated by commas.", many(INTEGER))
    batch: tuple[int, ...] = option((1,), "Rows of the batch, separated by commas.", many(INTEGER))
    method: tuple[str, ...] = option(
        ("hf-dynamic", "full", "icecache"),
        "Methods, separated by commas; see `kvthaw methods`. Options follow behind colons, those of a method and those of its "
        "cache: clusterkv:keep=2, pariskv:retrieved=100:window=512, icecache:budget=256:new_tokens=64. hf-dynamic and hf-offloaded "
        "are transformers' own caches.",
        many(WORD),
    )
    budget: int | float = option(
        256, "Most tokens attended per KV head and step; with a point, a fraction of the prompt.", BUDGET
    )
    retrieved: int | None = option(
        None, "Rows from the index in every step, beside the paper's regions; instead of a budget.", INTEGER
    )
    dense_layers: int | None = option(
        None, "First layers that keep all KV on the device; 2 for models of 16 layers and more, else 0.", INTEGER
    )
    steps: tuple[str, ...] = option(
        ("eager", "captured"),
        "How steps are taken, separated by commas: eager, captured (in CUDA graphs, between which a search on the host may stand), "
        "compiled (by torch.compile, then captured where that can be). What a device or a method cannot do is left out.",
        many(WORD),
    )
    new_tokens: int = option(64, "Tokens to decode and time.", INTEGER)
    prompt: str = option(
        "run",
        "run: prefill random tokens. filled: begin with a cache of random keys and values, without the prefill. text: begin with "
        "those that the shipped model has of its book, and search with its queries, so that rows come again as they do in text.",
        WORD,
    )
    hits: float | None = option(
        None,
        "Have neighbouring steps share this share of their rows, 0.7 say, as real text does; else rows are what random weights "
        "choose, hardly any twice.",
        SHARE,
    )
    share_host: bool = option(
        False, "Let all layers of a filled cache share their rows on the host, where it is too small for them.", FLAG
    )
    host_bytes: int | None = option(None, "The most host memory to use; asks the system what is free unless given.", INTEGER)
    profile: bool = option(
        False, "Break captured steps down by kernels, after those that count: of one way to decode in a run.", FLAG
    )
    seed: int = option(0, "Of weights, tokens, keys and values.", INTEGER)
    out: Path | None = option(None, "Keep one JSON line a run in this file; what stands there is not measured again.", FILE)
    plot: Path | None = option(None, "Draw time per output token and throughput into this PNG file.", FILE)
    commit: str | None = option(None, "What the lines say the code's commit is; asks git unless given.", WORD)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What `kvthaw bench figures` can be asked for."""

    name: tuple[str, ...] = option((), f"Which, separated by commas: {', '.join(FIGURES)}; all unless given.", many(WORD))
    shape: str | None = option(None, f"Another shape than the figure's own: {', '.join(SHAPES)}.", WORD)
    steps: tuple[str, ...] = option(
        (),
        "How steps are taken: captured or compiled, eager where that cannot be; as the figure has it unless given.",
        many(WORD),
    )
    shrink: int = option(1, "Divide lengths, tokens and budgets by this, to try a figure on a small machine.", INTEGER)
    out: Path | None = option(None, "Keep one JSON line a run in this file; what stands there is not measured again.", FILE)
    plot: Path | None = option(None, "Draw NAME.png into this folder.", FILE)
    draw: bool = option(False, "Only draw, from the lines that stand in the file.", FLAG)
    host_bytes: int | None = option(None, "The most host memory to use; asks the system what is free unless given.", INTEGER)
    seed: int = option(0, "Of weights, tokens, keys and values.", INTEGER)
    commit: str | None = option(None, "What the lines say the code's commit is; asks git unless given.", WORD)


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """What `kvthaw bench prefill` can be asked for."""

    shape: str = option("tiny", f"The model's shape, with random weights: {', '.join(SHAPES)}.", WORD)
    length: tuple[int, ...] = option((4096,), "Prompt lengths in tokens, separated by commas.", many(INTEGER))
    chunk: tuple[int, ...] = option(
        (1024,), "Tokens that go through the model at once, separated by commas; beside them, one pass.", many(INTEGER)
    )
    method: tuple[str, ...] = option(
        ("icecache",), "Methods, separated by commas, with options behind colons; see `kvthaw methods`.", many(WORD)
    )
    budget: int = option(1024, "Most tokens attended per KV head and step.", INTEGER)
    retrieved: int | None = option(
        None, "Rows from the index in every step, beside the paper's regions; instead of a budget.", INTEGER
    )
    dense_layers: int = option(0, "First layers that keep all KV on the device.", INTEGER)
    chunks_only: bool = option(False, "Leave out one pass, transformers' too.", FLAG)
    layers: int | None = option(
        None, "Only so many of the model's layers, for prompts that would take minutes: layers are alike.", at_least(1)
    )
    host_bytes: int | None = option(None, "The most host memory to use; asks the system what is free unless given.", INTEGER)
    out: Path | None = option(None, "Keep one JSON line a run in this file; what stands there is not measured again.", FILE)
    commit: str | None = option(None, "What the lines say the code's commit is; asks git unless given.", WORD)


@dataclass(frozen=True, kw_only=True)
class Indexing:
    """What `kvthaw bench indexing` can be asked for."""

    shape: str = option("tiny", "A model's shape; weights are random.", WORD)
    length: int = option(4096, "Tokens of the prompt.", at_least(1))
    method: tuple[str, ...] = option(
        ("clusterkv", "prkv"),
        "Methods of pages or clusters, separated by commas, with options as in clusterkv:clusters=400.",
        many(WORD),
    )
    budget: int = option(1024, "Most tokens attended per KV head and step.", INTEGER)
    runs: int = option(3, "Prefills that are timed, after one that is not; the median counts.", at_least(1))
    out: Path | None = option(None, "Append one JSON line a method to this file.", FILE)
    commit: str | None = option(None, "What the lines say the code's commit is; asks git unless given.", WORD)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What `kvthaw bench serving` can be asked for."""

    shape: str = option("tiny", "A model's shape; weights are random.", WORD)
    length: int = option(2048, "Tokens of the longest prompt; the shortest has half as many.", at_least(2))
    lanes: int = option(4, "Requests that are decoded together.", at_least(1))
    requests: int = option(8, "Requests in all.", at_least(1))
    new_tokens: int = option(64, "Tokens that each gets.", at_least(2))
    method: tuple[str, ...] = option(("full", "pariskv"), "Methods, separated by commas.", many(WORD))
    budget: int = option(256, "Most tokens attended per KV head and step.", INTEGER)
    compile: bool = option(False, "Compile the step first (a minute or more).", FLAG)
    out: Path | None = option(None, "Append one JSON line a method to this file.", FILE)
    commit: str | None = option(None, "What the lines say the code's commit is; asks git unless given.", WORD)
