"""Compiles kernels for a GPU on a machine that may have none, as far as types and layouts are checked (no machine code is made),
for those in SHARED until it is known how much shared memory they take.

Run as a script with targets and names of CASES ("cuda:90=nodes,units", "hip:gfx942=elsewhere"); prints a line of JSON for each
case: its target, and what was compiled or the error. Launchers are called with tensors that hold nothing, and what they would
launch is compiled instead.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvthaw.kernels.decode_step import DecodeStep, Places
    from kvthaw.kernels.encode import Quantizer, Summaries
    from kvthaw.kernels.in_place import InPlace

HEADS, GROUP = 2, 4
SHARED = {"cuda:89": 99 << 10}
"""Bytes of shared memory that a program may have."""


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def nodes(dtype: torch.dtype, dim: int) -> None:
    from kvthaw.kernels.row_format import E4M3
    from kvthaw.kernels.unit_select import launch_choice
    from kvthaw_baselines.kernels import nearest, node_digests, node_scores, stored_scores

    keys, stops = empty(HEADS, 700, dim, dtype=dtype), empty(HEADS, 36)
    nearest.launch(keys, empty(HEADS, 35, dtype=torch.int64))
    for outliers, order in ((2, empty(HEADS, 700)), (0, empty(700).expand(HEADS, -1))):
        node_digests.launch(keys, order, stops, outliers)
    query, counts = empty(3, HEADS * GROUP, dim, dtype=dtype), empty(3)
    digests = empty(3, HEADS, 70, node_digests.row_width(dim, 2), dtype=dtype)
    scores, parts = node_scores.launch(query, digests, empty(3, HEADS, 71), counts, scale=0.1, reach=2.0)
    rows, _ = launch_choice(
        scores, parts, empty(3, HEADS, 71), empty(3, HEADS, 700), counts, first=4, budget=1024, policy="mean"
    )
    for run, format in ((64, None), (4, None), (64, E4M3(dim, dtype))):
        table = empty(3, 8, dtype=torch.int64)
        stored_scores.launch(query, table, 1024, rows, counts, scale=0.1, run=run, format=format)


def units(dtype: torch.dtype, dim: int) -> None:
    from kvthaw.kernels import kmeans, observe, page_bounds, unit_select
    from kvthaw_baselines.kernels import static_first

    keys = empty(HEADS, 700, dim, dtype=dtype)
    span, where = (700, 44, ((0, 0),)), empty(1, 4)
    static_first.launch(empty(1, HEADS, 50), empty(1, HEADS, 700), empty(1, HEADS, 71), [span], where, size=16, first=4)
    kmeans.whole(kmeans.launch_in_pieces(keys, empty(HEADS, 30, dtype=torch.int64), distance="cosine", iterations=2))
    page_bounds.launch(keys, 16, spread="mean")
    observe.launch(empty(HEADS, 32, dim, dtype=dtype), keys, empty(HEADS, 32, dtype=torch.float32), scale=0.1)
    query, counts, stops = empty(3, HEADS * GROUP, dim, dtype=dtype), empty(3), empty(3, HEADS, 71)
    for wide, order in ((1, empty(3, HEADS, 700)), (2, None)):
        digests = empty(3, HEADS, 70, wide * dim, dtype=dtype)
        unit_select.launch(query, digests, stops, order, counts, first=4, budget=200, scale=0.1, policy="max")
    digests, stops = empty(3, HEADS, 9000, dim, dtype=dtype), empty(3, HEADS, 9001)  # more than are chosen at once
    unit_select.launch(query, digests, stops, None, counts, first=4, budget=200, scale=0.1, policy="max")


def rows(dtype: torch.dtype, dim: int) -> None:
    from kvthaw.kernels import uva_gather
    from kvthaw.kernels.rerank import TILE, Estimates
    from kvthaw.kernels.row_format import E4M3, RowFormat
    from kvthaw.kernels.topk import Floor, launch, run_length

    slab, some = empty(2, HEADS, 90, 2, dim, dtype=dtype), empty(2, HEADS, 40)
    for format in (RowFormat(dim, dtype), E4M3(dim, dtype)):
        uva_gather.uva_gather(empty(2, 8, dtype=torch.int64), 1024, slab, some, some, 50, None, format)
    width = 4 * TILE
    run = run_length(width, 40)
    assert run is not None
    scores, parts, peaks = (empty(2, HEADS, GROUP, *size, dtype=torch.float32) for size in ((width,), (96, 2), (width // run,)))
    found = Estimates(scores, parts, peaks, run)
    launch(found, empty(2, HEADS, width), empty(2), 40, 4, 0.1, "max")
    launch(found, empty(2, HEADS, width), empty(2), 40, 4, 0.1, "mean")
    floor = Floor(-8.0, empty(2, HEADS, GROUP, dtype=torch.float32), empty(2), 40)
    launch(found, empty(2, HEADS, width), empty(2), 40, 4, 0.1, "max", floor)


def remainders(dtype: torch.dtype, dim: int) -> None:
    """What rows are weighed by, and the estimate of what none selects."""
    from kvthaw.kernels import held_mass, page_means, remainder
    from kvthaw.kernels.row_format import E4M3, RowFormat
    from kvthaw.regions import Regions

    query, keys = empty(2, HEADS * GROUP, dim, dtype=dtype), empty(2, HEADS, 90, 2, dim, dtype=dtype)[:, :, :, 0]
    regions, centre = Regions(4, 32, 16), empty(2, HEADS, dim, dtype=torch.float32)
    held_mass.launch(query, keys, empty(2), empty(2), centre, regions=regions, scale=0.1)
    some = empty(2, HEADS, 80)
    tail = empty(2, HEADS, page_means.RING * 64, 2, dim, dtype=dtype)
    for format in (RowFormat(dim, dtype), E4M3(dim, dtype)):
        means = empty(2, HEADS, 90, *format.tail, dtype=format.stored)
        remainder.launch(query, means, some, empty(2), format, first=4, page=64, scale=0.1)
        scores = empty(2, HEADS, GROUP, 13120, dtype=torch.float32)
        for middle in (centre, None):
            own = remainder.Estimated(empty(2, HEADS, 13120), empty(2), scores, empty(2, HEADS, 360), middle)
            remainder.launch(query, means, some, empty(2), format, first=4, page=64, scale=0.1, estimated=own)
        added = page_means.Added(empty(1, HEADS, 16, dim, dtype=dtype), empty(1, HEADS, 16, dim, dtype=dtype), tail, means)
        page_means.launch([added] * 2, [page_means.Start(1, 70)], 64, format)


def clusters(dtype: torch.dtype, dim: int) -> None:
    """A prompt's clusters, then those of the tokens that come later."""
    from kvthaw.kernels import cover, kmeans

    for tokens, count in ((36864, 1152), (320, 10), (1003, 31)):
        keys, which = empty(HEADS, tokens, dim, dtype=dtype), empty(HEADS, count, dtype=torch.int64)
        cover.launch(empty(HEADS, tokens, dtype=torch.float32), keys, which)
        kmeans.whole(kmeans.launch_in_pieces(keys, which, distance="cosine", iterations=1))


def moves(dtype: torch.dtype, dim: int) -> None:
    from kvthaw.kernels import cover, extend, freeze, interleave, row_format, stream_keys
    from kvthaw.kernels.page_bounds import Spread

    slab, table, eight = empty(3, HEADS, 90, 2, dim, dtype=dtype), empty(3, 8, dtype=torch.int64), row_format.E4M3(dim, dtype)
    leaving, out = [(0, 7, 23, 7), (1, 9, 25, 25)], empty(2, 2, HEADS, 16, 2, dim, dtype=dtype)
    for format in (None, eight):
        freeze.freeze([slab] * 2, [table] * 2, 1024, leaving, out, sink=4, ring=80, format=format)
    row_format.encode(slab, eight.row_bytes)
    for strided in (empty(300, HEADS, dim, dtype=dtype).transpose(0, 1), empty(HEADS, 300, dim + 1, dtype=dtype)[:, :, 1:]):
        prompts = [interleave.Prompts(strided, strided, empty(3, 3)[:, 0])] * 2
        interleave.launch(prompts, [(0, 0, 120), (2, 120, 300)], empty(2, HEADS, 300, 2, dim, dtype=dtype))
    keys, places = (
        empty(2, HEADS, 16, 2, dim, dtype=dtype)[:, :, :, 0],
        [extend.Destination(0, 7, 40, 2), extend.Destination(1, 9, 50, 3)],
    )
    kinds: list[tuple[Tensor | None, int, Spread | None]]
    kinds = [(empty(3, HEADS, 300), 1, None), (None, 2, "mean"), (empty(3, HEADS, 300), 0, None)]
    for order, wide, spread in kinds:
        made = empty(3, HEADS, 70, wide * dim, dtype=dtype) if wide else None
        tables = extend.Tables(empty(3, HEADS, 48, dim, dtype=dtype), empty(3, HEADS, 71), empty(3), order, made)
        extend.launch([extend.Added(keys, tables)] * 2, places, size=32, first=4, spread=spread)
    far, which = empty(HEADS, 700, dtype=torch.float32), empty(HEADS, 30, dtype=torch.int64)
    keys = empty(HEADS, 700, dim, dtype=dtype)
    cover.launch(far, keys, which)
    for format in (None, eight):
        stream_keys.stream_keys(empty(1, 2, dtype=torch.int64), 64, 3, empty(1, HEADS, 20, dim, dtype=dtype), format)
    stream_keys.stream_rows(empty(2, dtype=torch.int64), 64, 3, empty(HEADS, 20, 2, dim, dtype=dtype))


def quantized(seqs: int, subs: int, bits: int) -> tuple[Summaries, Quantizer]:
    """Return summaries with room for 4,096 keys of `subs` subspaces, and the form of their codes."""
    from kvthaw.kernels.encode import Summaries, make_quantizer

    ids, codes = empty(seqs, HEADS, subs, 4096, dtype=torch.uint8), empty(seqs, HEADS, 4096, subs)
    weights = codes.bfloat16() if bits == 4 else None
    return Summaries(ids, codes, weights, empty(seqs, HEADS, subs, 256)), make_quantizer("meta", bits)


def codes(dtype: torch.dtype, dim: int) -> None:
    from kvthaw.kernels import bucket_topk, collide, planes, rerank, signs, tiers
    from kvthaw.kernels.srht import make_rotation
    from kvthaw_baselines.kernels import code_hits

    for width in (dim, 16):
        rotation = make_rotation(width, 0, device="meta")
        subs, totals = rotation.padded // 8, empty(3, HEADS, 128)
        summaries, quantizer = quantized(3, subs, 4)
        query = empty(3, HEADS * GROUP, width, dtype=dtype)
        _, votes = tiers.launch(query, rotation, summaries.sizes, empty(3, 6), totals, mean=False)
        collide.launch(votes, summaries.ids, empty(3), totals, 0)
        rotated, bits = planes.launch(query, rotation, HEADS, totals, mean=False)
        found = signs.launch(bits, summaries.ids, empty(3), totals)
        bucket_topk.launch(found, empty(3), empty(3), 640)
        for run in (64, 8) if width == dim else ():
            for known, form in ((summaries, quantizer), quantized(3, subs, 3)):
                rerank.launch(rotated, known, empty(3, HEADS, 640), empty(3), form, 0.1, run)
    tables, asked = (empty(3, HEADS, n, 150, dtype=torch.int16) for n in (900, GROUP))
    code_hits.launch(tables[:, :, :700], asked, empty(3, dtype=torch.int64))


def elsewhere(dtype: torch.dtype, dim: int) -> None:
    """What other GPUs have no instructions or launch options for: ParisKV's products and its chain, k-means, float32 products."""
    from kvthaw.kernels import flash_decode, kmeans, planes, rerank, signs
    from kvthaw.kernels.decode_step import DecodeStep, TokenOrder
    from kvthaw.kernels.srht import make_rotation

    rotation, totals = make_rotation(dim, 0, device="meta"), empty(3, HEADS, 128)
    subs = rotation.padded // 8
    query = empty(3, HEADS * GROUP, dim, dtype=dtype)
    rotated, bits = planes.launch(query, rotation, HEADS, totals, mean=False)
    signs.launch(bits, empty(3, HEADS, subs, 4096, dtype=torch.uint8), empty(3), totals)
    for form in (4, 3):
        summaries, quantizer = quantized(3, subs, form)
        rerank.launch(rotated, summaries, empty(3, HEADS, 640), empty(3), quantizer, 0.1, 64)
    kmeans.whole(
        kmeans.launch_in_pieces(
            empty(HEADS, 700, dim, dtype=dtype), empty(HEADS, 30, dtype=torch.int64), distance="l2", iterations=1
        )
    )
    slab = empty(3, HEADS, 500, 2, dim, dtype=dtype)
    flash_decode.flash_decode(DecodeStep(query, slab[:, :, :, 0], slab[:, :, :, 1], scale=0.1), TokenOrder(empty(3)))


def batches(dtype: torch.dtype, dim: int) -> None:
    """ParisKV's codes of what leaves the rings of one row and of several."""
    from kvthaw.kernels import encode
    from kvthaw.kernels.srht import make_rotation

    rotation = make_rotation(dim, 0, device="meta")
    for bits in (4, 3):
        into, quantizer = quantized(64, rotation.padded // 8, bits)
        for rows in (1, 3, 4, 16, 64):
            seqs, starts, stops = list(range(rows)), [7] * rows, [519] * rows
            encode.launch(empty(rows, HEADS, 512, 2, dim, dtype=dtype)[:, :, :, 0], rotation, quantizer, [into], seqs, starts)
            encode.launch_count(into, seqs, starts, stops)


def attention_steps(dtype: torch.dtype, dim: int) -> Iterator[tuple[DecodeStep, Places | InPlace]]:
    """Over a slab and over all keys, few and many."""
    from kvthaw.kernels.decode_step import DecodeStep, InSlab, TokenOrder
    from kvthaw.kernels.in_place import Every, InPlace, Selected
    from kvthaw.kernels.row_format import E4M3
    from kvthaw.regions import Regions

    query, new = empty(2, HEADS * GROUP, dim, dtype=dtype), empty(2, HEADS, dim, dtype=dtype)
    lengths, starts, newest, regions = empty(2), empty(2), (new, new), Regions(100, 200, 100)

    def step(keys: int, kind: torch.dtype = dtype) -> DecodeStep:
        slab = empty(2, HEADS, keys, 2, dim, dtype=kind)
        return DecodeStep(query, slab[:, :, :, 0], slab[:, :, :, 1], scale=0.1)

    yield step(500), InSlab(regions, lengths, starts, newest, empty(2, HEADS, 100, dtype=torch.bool))
    for kind in (dtype, torch.float8_e4m3fn):
        yield step(70_000, kind), TokenOrder(lengths, newest, starts)
    eight = E4M3(dim, dtype)
    for places, slots, format in (
        (500, None, None),
        (4000, empty(2, HEADS, 4000), eight),
        *((40_000, None, each) for each in (None, eight)),
    ):
        tally = None if slots is not None else (empty(2, HEADS), empty(4, dtype=torch.int64))
        selected = Selected(empty(2, HEADS, places), slots, empty(2, 8, dtype=torch.int64), 1024, tally, format)
        every = Every(places, selected.table, 1024, format)
        for each in (selected,) if slots is not None else (selected, every):
            yield step(500), InPlace(regions, lengths, starts, newest, each)


def attention(dtype: torch.dtype, dim: int) -> None:
    """Launch attention, and the kernels that run before and after it."""
    from kvthaw.kernels import admit, flash_decode, merge

    for step, places in attention_steps(dtype, dim):
        flash_decode.flash_decode(step, places)
    tables = empty(2, HEADS, 9000, dtype=torch.int16), empty(2, HEADS, 101), empty(2, HEADS, 101), empty(4, dtype=torch.int64)
    admit.admit(empty(2, HEADS, 100), *tables)
    placed = admit.Placed(empty(2, 8, dtype=torch.bool), 1024, empty(2, HEADS, 100))
    admit.admit(empty(2, HEADS, 100), *tables, placed)
    part, lse = empty(2, HEADS, 50, dim, dtype=dtype), empty(2, HEADS, 50, dtype=torch.float32)
    for count in range(1, merge.PARTS + 1):
        merge.launch([(part, lse)] * count, dtype)
    merge.launch([(part.float(), lse), (part, lse)], torch.float32)


def large(dtype: torch.dtype, dim: int) -> None:
    """Attention over rows of the slab, alone and together with rows of 8 bits."""
    from kvthaw.kernels import flash_decode
    from kvthaw.kernels.in_place import Every, InPlace, Selected

    for step, places in attention_steps(dtype, dim):
        rows = places.selected if isinstance(places, InPlace) else None
        pooled = isinstance(rows, Selected) and rows.slots is not None
        small = rows is not None and rows.format is not None and rows.format.fp8 and (pooled or isinstance(rows, Every))
        if small or (rows is None and step.keys.dtype == dtype):
            flash_decode.flash_decode(step, places)


def chunks(dtype: torch.dtype, dim: int) -> None:
    """Attention of a prompt's chunks of several lengths."""
    from kvthaw.kernels import merge

    for steps in (16, 11, 1):
        part, lse = (
            empty(1, steps, HEADS * GROUP, dim, dtype=dtype).transpose(1, 2),
            empty(1, HEADS * GROUP, steps, dtype=torch.float32),
        )
        merge.launch([(part, lse)] * 2, dtype)


def model(dtype: torch.dtype, dim: int) -> None:
    """What stands between a model's products."""
    from kvthaw.kernels import exchange, gated, linear, packed, rms_norm, rotate
    from kvthaw.kernels.weights import Float8Weight, Int4Weight, Weight

    for rows, width in ((700, 4096), (700, 14336), (3, dim)):
        rms_norm.launch(empty(rows, width, dtype=dtype), rms_norm.Norm(empty(width, dtype=dtype), 1e-6))
        rms_norm.add_launch(
            empty(rows, width, dtype=dtype), empty(rows, width, dtype=dtype), rms_norm.Norm(empty(width, dtype=dtype), 1e-6)
        )
    gated.launch(empty(700, 14336, dtype=dtype), empty(700, 14336, dtype=dtype), "silu")
    gate, up = empty(700, 2 * 14336, dtype=dtype).chunk(2, dim=-1)
    gated.launch(gate, up, "silu")
    for width in (576, 4096, 14336):
        x, norm = empty(1, width, dtype=dtype), rms_norm.Norm(empty(width, dtype=dtype), 1e-6)
        weights = [empty(n, width, dtype=dtype) for n in (64, 16, 16)]
        linear.launch(x, weights, [None] * 3, norm=norm)
        linear.launch(x, [weights[1]] * 2, [empty(16, dtype=dtype)] * 2, norm=norm, gate="gelu_tanh")
        linear.launch(x, weights[:1], [None], residual=empty(1, 64, dtype=dtype))
        linear.launch(x, weights[:1] * 3, [None] * 3, norm=norm, turn=linear.Turn(*(empty(16, dtype=dtype) for _ in range(2))))

        def int4(group: int, width: int = width) -> Weight:
            wide = -(-width // 1024) * 1024
            scales = empty(wide // group, 64, 2, dtype=torch.bfloat16)
            return Int4Weight(empty(8, wide // 128, 32, 4), scales, group, torch.Size((64, width)))

        eight = Float8Weight(empty(64, width, dtype=torch.float8_e4m3fn), empty(64, dtype=torch.float32))
        for kind in (eight, int4(32), int4(128)):
            linear.launch(x, [kind] * 3, [None] * 3, norm=norm)
            linear.launch(x, [kind] * 2, [empty(64, dtype=dtype)] * 2, norm=norm, gate="silu")
            linear.launch(x, [kind], [None], residual=empty(1, 64, dtype=dtype))
        linear.launch(x, [eight] * 3, [None] * 3, norm=norm, turn=linear.Turn(*(empty(16, dtype=dtype) for _ in range(2))))
    query, key = (empty(2, 700, heads, dim, dtype=dtype).transpose(1, 2) for heads in (HEADS * GROUP, HEADS))
    inbox = exchange.Inbox(empty(exchange.BUFFERS, 2, 65536, dtype=dtype), empty(2, dtype=torch.int64), empty(64), 1)
    exchange.add_up(empty(1, 4096, dtype=dtype), inbox)
    for rows in (1, 2):
        rotate.launch(query, key, empty(rows, 700, dim, dtype=dtype), empty(rows, 700, dim, dtype=dtype))
    if dtype.itemsize == 2:
        query, key = (empty(1, 700, heads, dim, dtype=dtype).transpose(1, 2) for heads in (HEADS * GROUP, HEADS))
        packed.launch(query, key, key, [300, 400], empty(3), scale=0.1)
        packed.launch(query, key, key, [300, 400], empty(3), scale=0.1, softcap=3.0, sinks=empty(HEADS * GROUP, dtype=dtype))


CASES: dict[str, Callable[[torch.dtype, int], None]] = {
    "attention": attention,
    "nodes": nodes,
    "units": units,
    "clusters": clusters,
    "rows": rows,
    "remainders": remainders,
    "moves": moves,
    "codes": codes,
    "elsewhere": elsewhere,
    "large": large,
    "batches": batches,
    "chunks": chunks,
    "model": model,
}


class _Stop(Exception):  # noqa: N818
    """Far enough."""


def check_layouts(module: str) -> None:
    """Raise AssertionError where instructions of a warp get tensors in a layout that stops a kernel on a GPU: a thread has to hold
    four elements, and the next thread the next four.

    module: a kernel with the GPU's layouts.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", module, re.MULTILINE))
    for line in (line for line in module.splitlines() if "@off trap" in line):
        for name in set(re.findall(r"(#\w+)>", line.partition("packed_element = 4 ")[2])):
            assert "sizePerThread = [4], threadsPerWarp = [32]" in layouts[name], layouts[name]


def _only_compile(target: str, seen: list[str], kinds: set[tuple[str, str]], shared: dict[str, int]) -> None:
    """From now on a launch compiles its kernel for a target, up to the GPU's own layouts. seen: the kernels' names; kinds: with
    them, hashes of what was compiled, the same for launches that a GPU would serve with the same machine code, which is compiled
    once; shared: the most shared memory of a kernel, of targets in SHARED."""
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kind, _, arch = target.partition(":")
    cuda = kind == "cuda"
    compiler: Any = backends["nvidia" if cuda else "amd"].compiler
    torch.version.hip = None if cuda else "6"

    import kvthaw.kernels.gpu
    import kvthaw.kernels.split

    def nvidia(device: torch.device, least: tuple[int, int] = (7, 0)) -> bool:
        return cuda and least <= divmod(int(arch), 10)

    kvthaw.kernels.gpu.nvidia = nvidia  # before any other module takes it from there
    kvthaw.kernels.split.shared_memory = lambda device: SHARED.get(target, 227 << 10)  # type: ignore[assignment]

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", int(arch), 32) if cuda else GPUTarget("hip", arch, 64)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    class Argument:
        def __init__(self, tensor: Tensor) -> None:
            self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride
            self.at = int(tensor.storage_offset()) * tensor.element_size()

        def data_ptr(self) -> int:
            return self.at  # within its storage, whose own address is a multiple of 16

        def ptr_range(self) -> int:
            return 0

    run, stages_of, make_ir = JITFunction.run, compiler.add_stages, ASTSource.make_ir
    asked, compiled, taken = "", set[str](), [0]

    def make_once(self: Any, target: Any, options: Any, *rest: Any) -> Any:
        nonlocal asked
        asked = f"{self.hash()} {options.hash()}"
        if asked in compiled:
            raise _Stop
        return make_ir(self, target, options, *rest)

    def add_stages(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        stages_of(self, stages, *rest)
        lower = stages["llir"]

        def stop(source: Any, metadata: dict[str, Any]) -> None:
            check_layouts(str(source))
            if target in SHARED:
                lower(source, metadata)
                taken.append(metadata["shared"])
            raise _Stop

        stages["llir"] = stop

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def told(value: Any) -> Any:
            return Argument(value) if isinstance(value, Tensor) else value

        try:
            run(self, *map(told, args), grid=grid, warmup=True, **{name: told(value) for name, value in kwargs.items()})
        except _Stop:
            compiled.add(asked)
            seen.append(self.__name__)
            shared[self.__name__] = max(shared.get(self.__name__, 0), taken[-1])
            kinds.add((self.__name__, asked))

    driver.set_active(Driver())
    compiler.add_stages, JITFunction.run, ASTSource.make_ir = add_stages, compile_only, make_once


def compile_cases(target: str, names: list[str]) -> None:
    """Print what becomes of each case; this process then compiles for no other target."""
    seen: list[str] = []
    kinds: set[tuple[str, str]] = set()
    shared: dict[str, int] = {}
    _only_compile(target, seen, kinds, shared)
    for name in names:
        seen.clear()
        kinds.clear()
        line: dict[str, Any] = {"target": target, "case": name}
        try:
            CASES[name](torch.bfloat16, 128 if target in SHARED else 40)  # a width that is padded
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"
        line["kinds"], line["shared"] = Counter(kernel for kernel, _ in kinds), shared
        print(json.dumps({**line, "compiled": seen}), flush=True)


def main() -> None:
    """A process for each target, forked once what takes seconds to import is there."""
    import triton  # noqa: F401

    empty(1).clone().square()  # torch imports its compilers for the first operations without data
    for argument in sys.argv[1:]:
        target, _, names = argument.partition("=")
        if (child := os.fork()) == 0:
            compile_cases(target, names.split(","))
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            sys.exit(f"compiling for {target} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
