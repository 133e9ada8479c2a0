"""Kernels of every instruction set, and gathering, against torch."""

from __future__ import annotations

import importlib
import math
import os
import sys
import threading

import pytest
import torch

from kvthaw.cache.host import HostStore
from kvthaw.errors import KvthawError
from kvthaw.kernels.row_format import E4M3, HEADER
from kvthaw.native import DTYPES, ELEMENTS, Isa, _native, cores, gather_rows, isa_code, isas


def dots(query: torch.Tensor, rows: torch.Tensor, isa: Isa) -> torch.Tensor:
    """query [D] float32 times rows [n, D], each contiguous: [n] float32."""
    out, stride = torch.empty(len(rows)), rows.stride(0) * rows.element_size()
    sizes = len(rows), stride, rows.shape[1], DTYPES[rows.dtype]
    _native.dots(query.data_ptr(), rows.data_ptr(), *sizes, out.data_ptr(), isa_code(isa))
    return out


def log_sum_exp(x: torch.Tensor, scale: float, isa: Isa) -> float:
    """The natural logarithm of the sum of exp(scale x), x [n] float32."""
    return _native.log_sum_exp(x.data_ptr(), len(x), scale, isa_code(isa))


def make_store(lengths: list[int], heads: int, dim: int, dtype: torch.dtype, block_size: int = 24) -> HostStore:
    store = HostStore(len(lengths), heads, dim, dtype, block_size=block_size)
    g = torch.Generator().manual_seed(len(lengths))
    for seq, n in enumerate(lengths):
        store.append(seq, torch.randn(heads, n, 2, dim, generator=g).to(dtype))
    return store


def test_this_machine_has_what_it_says() -> None:
    assert isas()[0] == "scalar"
    assert _native.best_isa() == isa_code(isas()[-1])
    assert cores() >= 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that pins processes to cores")
def test_a_process_on_one_core_has_one() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 80, 96, 128, 256])
def test_dots(isa: Isa, dtype: torch.dtype, dim: int) -> None:
    g = torch.Generator().manual_seed(dim)
    query = torch.randn(dim, generator=g)
    for n in (0, 1, 3, 4, 5, 37):
        rows = torch.randn(n, 2 * dim, generator=g).to(dtype)[:, :dim]  # a K beside its V
        torch.testing.assert_close(dots(query, rows, isa=isa), rows.float() @ query, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dim", [1, 7, 16, 80, 128, 576])
def test_dots_of_queries_together_with_codes(isa: Isa, dim: int) -> None:
    """Sums of whole numbers, so that every instruction set gives the same bits, times the steps of query and row."""
    g = torch.Generator().manual_seed(dim)
    codes, steps = torch.randint(-127, 128, (37, dim), generator=g, dtype=torch.int8), torch.rand(37, 1, generator=g)
    rows = torch.cat([torch.nn.functional.pad(codes, (0, -dim % 4)), steps.view(torch.int8)], 1).contiguous()
    for many in (1, 2, 3, 4):
        queries, out = torch.randn(many, dim, generator=g), torch.empty(many, 37)
        _native.dots_together(queries.data_ptr(), many, rows.data_ptr(), 37, dim, out.data_ptr(), isa_code(isa))
        for query, own in zip(queries, out, strict=True):
            step = query.abs().max() / min(32767, (2**31 - 1) // (127 * dim))
            whole = codes.long() @ (query / step).round().long()
            assert torch.equal(own, whole.float() * (step * steps[:, 0]))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dim", [1, 7, 16, 80, 128])
def test_dots_with_rows_of_8_bits(isa: Isa, dim: int) -> None:
    """To the bit what those of the decoded rows are, subnormals included; a key that is not finite stays so."""
    format, g = E4M3(dim, torch.float32), torch.Generator().manual_seed(dim)
    rows = torch.randn(37, 2, dim, generator=g) * torch.exp2(torch.randint(-30, 4, (37, 2, dim), generator=g))
    rows[5, 0, dim // 2] = torch.inf
    query, stored, out = torch.randn(dim, generator=g), format.encode(rows), torch.empty(37)
    sizes = len(rows), format.row_bytes, dim, ELEMENTS[format.element]
    _native.dots(query.data_ptr(), stored.data_ptr() + HEADER, *sizes, out.data_ptr(), isa_code(isa))
    expected = dots(query, format.decode_keys(stored).contiguous(), isa=isa)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert out.isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1000.0])
def test_log_sum_exp(isa: Isa, spread: float) -> None:
    g = torch.Generator().manual_seed(4)
    for n in (1, 5, 16, 33, 2300):
        x = spread * torch.randn(n, generator=g)
        assert log_sum_exp(x, 0.3, isa=isa) == pytest.approx(float(torch.logsumexp(0.3 * x.double(), 0)), rel=1e-6, abs=2e-6)
    alone = [log_sum_exp(torch.tensor([0.0, *[-d] * 16]), 1.0, isa=isa) for d in torch.linspace(0, 3, 50).tolist()]
    exact = [math.log(1 + 16 * math.exp(-d)) for d in torch.linspace(0, 3, 50).tolist()]
    assert alone == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("isa", isas())
def test_halves_of_every_size(isa: Isa) -> None:
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    rows = bits.view(torch.float16)[:, None].repeat(1, 16).contiguous()  # every number there is, subnormals too
    query = torch.zeros(16)
    query[3] = 1.0
    got, want = dots(query, rows, isa=isa), rows[:, 0].float()
    finite = want.isfinite()
    assert torch.equal(got[finite], want[finite])
    assert not got[~finite].isfinite().any()


@pytest.mark.parametrize("isa", isas())
def test_equal_rows_have_equal_scores(isa: Isa) -> None:
    g = torch.Generator().manual_seed(3)
    row, query = torch.randn(1, 80, generator=g), torch.randn(80, generator=g)
    assert len(dots(query, row.repeat(11, 1), isa=isa).unique()) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_gather_rows(dtype: torch.dtype, threads: int) -> None:
    lengths, heads, dim, width = [500, 0, 70], 3, 64, 150
    store = make_store(lengths, heads, dim, dtype)
    g = torch.Generator().manual_seed(0)
    rows = torch.full((3, heads, width), -1, dtype=torch.int32)
    for seq, n in enumerate(lengths):
        if n:
            drawn = torch.randint(n, (heads, width), generator=g, dtype=torch.int32)
            rows[seq] = torch.where(torch.rand(heads, width, generator=g) < 0.4, drawn, -1)
    wanted = int((rows >= 0).sum())
    out = torch.full((wanted + 2, 2, dim), float("nan"), dtype=dtype)
    count, where = gather_rows(store.table.on_cpu(), store.block_size, rows, out, threads=threads)
    assert count == wanted
    assert torch.equal(where, (rows.flatten() >= 0).nonzero()[:, 0])
    for i, flat in enumerate(where.tolist()):
        seq, head, row = flat // (heads * width), flat // width % heads, int(rows.flatten()[flat])
        assert torch.equal(out[i], store.read(seq, row, row + 1)[head, 0])
    assert out[wanted:].isnan().all()
    assert gather_rows(store.table.on_cpu(), store.block_size, torch.full_like(rows, -1), out)[0] == 0


def test_bad_tensors_are_refused() -> None:
    store = make_store([50], 1, 64, torch.float32)
    rows = torch.arange(8, dtype=torch.int32)[None, None]
    with pytest.raises(ValueError, match="room for 7 rows; 8 are wanted"):
        gather_rows(store.table.on_cpu(), store.block_size, rows, torch.empty(7, 2, 64))
    with pytest.raises(ValueError, match=r"rows is torch\.int64"):
        gather_rows(store.table.on_cpu(), store.block_size, rows.long(), torch.empty(8, 2, 64))
    with pytest.raises(ValueError, match="contiguous"):
        gather_rows(store.table.on_cpu(), store.block_size, rows, torch.empty(8, 64, 2).mT)


def test_many_python_threads_at_once() -> None:
    store = make_store([3000], 2, 64, torch.float32, block_size=512)
    rows = torch.randint(3000, (1, 2, 700), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    want = torch.empty(1400, 2, 64)
    gather_rows(store.table.on_cpu(), store.block_size, rows, want, threads=1)
    wrong = []

    def work() -> None:
        for threads in (0, 1, 2, 3, 4) * 10:
            out = torch.empty_like(want)
            gather_rows(store.table.on_cpu(), store.block_size, rows, out, threads=threads)
            if not torch.equal(out, want):
                wrong.append(threads)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_without_the_extension_it_is_said_how_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an error of kvthaw's own, which commands print as one line."""
    monkeypatch.setitem(sys.modules, "kvthaw.native._native", None)
    monkeypatch.delitem(sys.modules, "kvthaw.native")
    with pytest.raises(KvthawError, match=r"C\+\+ part is not built for this Python .*`make demo` builds it"):
        importlib.import_module("kvthaw.native")
