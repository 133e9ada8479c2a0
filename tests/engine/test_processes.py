"""The processes of a split model meet, and tell each other what changes, where no other machine can take part."""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kvthaw.cache.ranks import Ranks
from kvthaw.engine.lockstep import Cancel, Forget, Lockstep, Submit, read, write
from kvthaw.engine.processes import meeting, spawned
from kvthaw.engine.request import RequestSpec
from kvthaw.engine.sampling import GREEDY, Sampling


def test_the_store_listens_on_the_loopback_interface_alone() -> None:
    store = meeting()
    store.set("asked", "told")
    assert dist.TCPStore("127.0.0.1", store.port).get("asked") == b"told"
    for host in ("::1", "127.0.0.2"):  # addresses of this machine that a socket on all interfaces has too
        with pytest.raises(OSError, match=r".*"), socket.create_connection((host, store.port), timeout=2):
            pass


def listening() -> set[str]:
    """The addresses at which this process listens, as the kernel writes them."""
    mine = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


def _start(pipe: Connection) -> None:
    """Be the first of two processes; send at which addresses both listen."""
    with spawned(2, _tell):
        pipe.send(_tell())


def _tell() -> list[Any]:
    Lockstep(Ranks(size=2))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, listening())
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's list of sockets")
@pytest.mark.skipif(torch.cuda.is_available(), reason="forked processes have no GPU")
def test_no_process_listens_where_other_machines_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [name for _, name in socket.if_nameindex() if not name.startswith("lo")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[-1] if others else "lo")
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    mine, its = context.Pipe(duplex=False)
    first = context.Process(target=_start, args=(its,))
    first.start()
    its.close()
    try:
        assert mine.poll(60)
        assert mine.recv() == [{"0100007F"}, {"0100007F"}]
        first.join(60)
        assert first.exitcode == 0
    finally:
        first.kill()


def test_changes_come_as_they_were_sent() -> None:
    """Every setting of Sampling, none of them at its default, and every field of a request that can be submitted."""
    sampling = Sampling(
        temperature=0.1 + 0.2,
        top_k=7,
        top_p=0.9,
        seed=-(1 << 63),
        min_p=1e-30,
        logit_bias={5: -100, 6: 0.5},
        repetition_penalty=1.1,
        frequency_penalty=-0.1,
        presence_penalty=0.2,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        stop=("\n", "\ud800", "\u00e9"),
        include_stop=True,
        show_tokens=("<tool_call>",),
        logprobs=0,
        prompt_logprobs=3,
    )
    same = [field.name for field in fields(Sampling) if getattr(sampling, field.name) == getattr(GREEDY, field.name)]
    assert same == ["grammar"]
    about = [{"role": "user", "content": "\u00e9"}]
    spec = RequestSpec(
        torch.tensor([1, 2, 150000]), 9, frozenset({2, 3}), sampling, "salt", "client", "name", about, text_after=(7, 8)
    )
    submit = Submit(1 << 40, spec, True, '{"type": "structural_tag"}', 3)
    sent = read(write([submit, Cancel(2), Forget("", "a b")]))
    assert sent is not None
    assert sent[1:] == [Cancel(2), Forget("", "a b")]
    came = sent[0]
    assert isinstance(came, Submit)
    assert (came.number, came.decodes, came.grammar, came.priority) == (submit.number, True, submit.grammar, 3)
    assert came.spec.ids.equal(spec.ids)
    rest = [field.name for field in fields(RequestSpec) if field.name != "ids"]
    assert [getattr(came.spec, name) for name in rest] == [getattr(spec, name) for name in rest]
    assert read(write(None)) is None
