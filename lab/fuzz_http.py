"""Random requests to a server: none may be answered with 500 or above.

usage: python lab/fuzz_http.py [--requests 2000] [--seed 0] [--url http://127.0.0.1:8000]

Without --url it starts a server of a tiny model. What a request was that failed is printed. The last line is JSON with the counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "serve"))

import httpx2
from http_fuzz import TEMPLATE, Requests, answer
from servers import serving

import bytemodel
from kvthaw.engine.hf.model import load


@contextmanager
def client(url: str | None) -> Iterator[httpx2.Client]:
    """Yield a client of a server."""
    if url is not None:
        with httpx2.Client(base_url=url, timeout=120) as http:
            yield http
        return
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = load(str(bytemodel.save(Path(folder) / "model")), dtype="float32")
        with serving(model, tokenizer, chat_template=TEMPLATE, kv_dir=Path(folder) / "kv") as served:
            served.http.timeout = 300  # an answer without a limit of its own has all tokens that there are
            yield served.http


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    slowest = 0.0
    with client(given.url) as http:
        for asked in islice(Requests(given.seed), given.requests):
            began = time.monotonic()
            status, found = answer(http, asked)
            slowest = max(slowest, time.monotonic() - began)
            counts[str(status)] += 1
            counts["failed"] += found is not None
            if found:
                print(f"{asked}\n  {found}", flush=True)
        counts["healthy"] = int(http.get("/health").status_code == 200)
    print(json.dumps({"seed": given.seed, **counts, "slowest_s": round(slowest, 2)}))
    return int(bool(counts["failed"]) or not counts["healthy"])


if __name__ == "__main__":
    sys.exit(main())
