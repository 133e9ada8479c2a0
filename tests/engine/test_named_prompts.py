"""A prompt has its name from the moment at which it is whole, whatever happens to its request afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvthaw import Batch, PrefixCache, Request, Scheduler
from kvthaw.cache.kv_cache import KVCache
from zoo import build_exact, prompt

METHODS = ("full", "quest", "icecache-digest")
IDS = prompt(1, 200)[0]  # its last block is not full


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_exact("llama", num_hidden_layers=2)


def scheduler_of(model: PreTrainedModel, method: str = "quest", **more: Any) -> tuple[Scheduler, PrefixCache]:
    prefix, how = PrefixCache(**more), {} if method == "full" else {"budget": 48, "dense_layers": 1}
    batch = Batch(model, method, max_seqs=1, capacity=500, block_size=32, prefix_cache=prefix, **how)
    return Scheduler(batch, step_tokens=100), prefix


def begun(scheduler: Scheduler, new: int = 100, **how: Any) -> Request:
    """A request whose prompt is whole, with its first token."""
    request = scheduler.submit(IDS, max_new_tokens=new, stop=(), name="doc", **how)
    while not request.tokens:
        scheduler.step()
    return request


def ended(scheduler: Scheduler, request: Request) -> list[int]:
    while scheduler.busy:
        scheduler.step()
    assert request.error is None
    return request.tokens


def cancel(scheduler: Scheduler, request: Request) -> None:
    scheduler.cancel(request)


def preempt(scheduler: Scheduler, request: Request) -> None:
    """Have it wait, with what it held in host memory, and leave from there."""
    first = scheduler.submit(IDS[:50], max_new_tokens=3, stop=(), priority=-1)
    scheduler.step()
    assert request in scheduler.waiting
    assert request.swapped is not None
    scheduler.cancel(request)
    ended(scheduler, first)


def recompute(scheduler: Scheduler, request: Request) -> None:
    """Have it begin again, and leave before its prompt is whole again."""
    scheduler.batch.preempt(request, keep=False)
    scheduler.batch.join(request)
    scheduler.cancel(request)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("leave", [cancel, preempt, recompute])
@torch.no_grad()
def test_a_request_that_leaves_keeps_its_prompt(
    model: PreTrainedModel, method: str, leave: Callable[[Scheduler, Request], None]
) -> None:
    scheduler, prefix = scheduler_of(model, method)
    leave(scheduler, begun(scheduler))
    assert prefix.entries["", "doc"].ids.equal(IDS)
    assert prefix.stats().names == ["doc"]
    longer = torch.cat((IDS, IDS[:130]))
    again = scheduler.submit(longer, max_new_tokens=4, stop=())
    plain, _ = scheduler_of(model, method)
    assert ended(scheduler, again) == ended(plain, plain.submit(longer, max_new_tokens=4, stop=()))
    assert again.cached_tokens == 200


@torch.no_grad()
def test_a_prompt_whose_index_is_not_built_keeps_its_name(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, prefix = scheduler_of(model)
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "built", lambda *_, **__: False)
        request = scheduler.submit(IDS, max_new_tokens=4, stop=(), name="doc")
        while request.prefilled < request.prompt:
            scheduler.step()
        scheduler.cancel(request)
    assert prefix.entries["", "doc"].ids.equal(IDS)


@torch.no_grad()
def test_what_is_deleted_or_replaced_while_a_request_goes_on_stays_so(model: PreTrainedModel) -> None:
    scheduler, prefix = scheduler_of(model)
    request = begun(scheduler, new=3)
    prefix.forget("doc")
    ended(scheduler, request)
    assert prefix.entries == {}


@torch.no_grad()
def test_what_is_replaced_has_its_name_meanwhile(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's event loop looks it up there."""
    scheduler, prefix = scheduler_of(model)
    ended(scheduler, begun(scheduler, new=1))
    pin, seen = prefix._tree.pin, list[bool]()
    monkeypatch.setattr(prefix._tree, "pin", lambda *how: (pin(*how), seen.append(("", "doc") in prefix.entries)))
    ended(scheduler, scheduler.submit(IDS[:150], max_new_tokens=1, stop=(), name="doc"))
    assert (prefix.entries["", "doc"].ids.equal(IDS[:150]), prefix.stats().names) == (True, ["doc"])
    assert all(seen)
    assert len(seen) >= 2


@torch.no_grad()
def test_a_prompt_that_cannot_have_its_name_says_so_at_the_end(model: PreTrainedModel) -> None:
    scheduler, prefix = scheduler_of(model, host_bytes=1)
    request = begun(scheduler, new=3)
    assert request.finished is None
    while scheduler.busy:
        scheduler.step()
    assert (request.finished, len(request.tokens)) == ("length", 3)
    assert "'doc' cannot be kept" in str(request.error)
    assert prefix.entries == {}
