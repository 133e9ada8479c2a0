"""Output that follows a grammar: which tokens may come next, kept as bits on the device. JSON by xgrammar."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvthaw.engine.json_schema import check_schema
from kvthaw.errors import ConfigError

Source = tuple[str, bool]
"""A JSON schema as text, and whether objects have no members that it does not name."""
OBJECT: Source = (json.dumps({"type": "object"}), False)
"""Any JSON object."""
_THREADS = 3
_CACHED_BYTES = 64 << 20  # of compiled grammars
MOST_TRIES = 150_000_000
"""How often compiling a schema may try a token, which is most of its time: less than a minute of a core."""
_LEAST_VOCABULARY = 4096  # a state costs as much as so many tokens


class Matcher:
    """Follows one output through a grammar."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self.vocabulary = matcher, vocabulary

    def accept(self, token: int) -> bool:
        """Go on by a token. Returns whether the grammar allows it."""
        return bool(self._matcher.accept_token(token))

    def reset(self) -> None:
        """Go back to the beginning."""
        self._matcher.reset()

    def fill(self, bits: np.ndarray[Any, Any]) -> None:
        """Write which tokens may come next into bits [1, ceil(V / 32)] int32, on the host: token t is bit t % 32 of t // 32."""
        self._matcher.fill_next_token_bitmask(bits)


class Grammar:
    """A compiled grammar of one tokenizer, which any number of outputs may follow. source: of which `Grammars.compile` makes it in
    another process."""

    def __init__(self, compiled: Any, vocabulary: int, source: Source) -> None:
        self._compiled, self.vocabulary, self.source = compiled, vocabulary, source
        self.bytes = int(compiled.memory_size_bytes)

    def matcher(self, stops: Collection[int]) -> Matcher:
        """Return what follows an output that ends with one of the tokens `stops`; raises ConfigError where there are none."""
        import xgrammar

        if not stops:
            raise ConfigError(
                "ignore_eos is set or the model has no end-of-sequence token; a grammar needs a token to end with"
            )
        return Matcher(xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=sorted(stops)), self.vocabulary)


class Grammars:
    """Compiles grammars for a tokenizer of transformers and a model of so many tokens, and keeps the latest.

    JSON is laid out as json.dumps lays it out, so no token is spent on white space. Raises ConfigError where xgrammar is missing.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise ConfigError("JSON output needs xgrammar, which is not installed: pip install 'kvthaw[serve]'") from None
        known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[0])
        special = set(tokenizer.all_special_ids)  # they are left out where the output is decoded
        texts = [
            b"" if token in special or any(byte < 32 for byte in text) else text  # JSON has control characters escaped alone
            for token, text in enumerate(known.decoded_vocab)
        ]
        info = xgrammar.TokenizerInfo(texts, vocab_size=vocabulary, stop_token_ids=[0])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHED_BYTES)
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._kept: OrderedDict[Source, Grammar] = OrderedDict()  # the latest used last

    def json(self) -> Grammar:
        """Return the grammar of a JSON object."""
        return self.compile(OBJECT)

    def json_schema(self, schema: Any, *, strict: bool = False) -> Grammar:
        """Return the grammar of JSON that a schema describes; strict: objects have no members that it does not name.

        Raises ConfigError for a schema whose keywords would not all be met or which takes too long to compile, see `read`."""
        return self.compile(self.read(schema, strict=strict)[0])

    def read(self, schema: Any, *, strict: bool = False) -> tuple[Source, int]:
        """Return the source of a schema's grammar, and how often compiling it tries a token. Raises
        ConfigError for a schema that is not served, see `check_schema`, and for one that takes too long."""
        passes = check_schema(schema)
        tokens = max(self._vocabulary, _LEAST_VOCABULARY)
        most = MOST_TRIES // tokens
        if passes > most:
            raise ConfigError(
                f"json_schema takes {round(passes)} passes over a vocabulary of {self._vocabulary} tokens to compile; "
                f"it may take {most}. A minLength or maxLength above 128 takes 192, a pattern one for each way on in it"
            )
        return (json.dumps(schema), strict), round(passes * tokens)

    def known(self, source: Source) -> Grammar | None:
        """Return a grammar that was compiled lately."""
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def compile(self, source: Source) -> Grammar:
        """Return the grammar of a schema that was checked; raises ConfigError where nothing can meet it."""
        if (known := self.known(source)) is not None:
            return known
        schema, strict = source
        try:
            compiled = self._compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=strict)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"json_schema cannot be met: {_why(error)}") from None
        made = Grammar(compiled, self._vocabulary, source)
        with self._lock:
            self._kept[source] = made
            while len(self._kept) > 1 and sum(one.bytes for one in self._kept.values()) > _CACHED_BYTES:
                self._kept.popitem(last=False)
        return made


class ComingGrammars:
    """Compiles grammars in threads, beginning before they are needed.

    make: makes what compiles them, when it is first needed.
    """

    def __init__(self, make: Callable[[], Grammars]) -> None:
        self._make, self._made, self._lock = make, list[Grammars](), threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "kvthaw-grammar")
        self._coming: dict[Source, Future[Grammar]] = {}

    def begin(self, source: Source) -> None:
        """Begin to compile a grammar that will be needed."""
        self._coming = {known: coming for known, coming in self._coming.items() if not coming.done()}  # others are kept
        if source not in self._coming:
            self._coming[source] = self._threads.submit(self._compile, source)

    def get(self, source: Source) -> Grammar:
        """Return a grammar. Waits only where it has not been compiled, or not been kept."""
        self.begin(source)
        return self._coming[source].result()

    def _compile(self, source: Source) -> Grammar:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
        return self._made[0].compile(source)


def _why(error: Exception) -> str:
    """Return what xgrammar says of a schema, without the place in its own code."""
    said = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    return "xgrammar makes no grammar of it" if not said or "Check failed" in said else said


class TokenMasks:
    """Which tokens may come next in each sequence of a running batch; all, where no matcher was given.

    The bits are made on the host while the device computes the logits that they are for, and copied there from pinned memory, so
    a step does not wait for the device."""

    def __init__(self, seqs: int, vocabulary: int, device: torch.device) -> None:
        self._matchers: list[Matcher | None] = [None] * seqs
        self._vocabulary = vocabulary
        shape = seqs, -(-vocabulary // 32)
        with torch.inference_mode(False):
            self._host = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._bits = torch.full(shape, -1, dtype=torch.int32, device=device)
            self._places = torch.arange(32, dtype=torch.int32, device=device)
        self._rows = self._host.numpy()

    def join(self, seq: int, matcher: Matcher | None) -> None:
        """Let a sequence follow a matcher; None: any token."""
        self._matchers[seq] = matcher
        self._rows[seq] = -1

    def __call__(self, x: Tensor, seqs: slice) -> Tensor:
        """Return logits [B, V] of these sequences with -inf for tokens that may not come."""
        matchers = self._matchers[seqs]
        if not any(matchers):
            return x
        for row, matcher in zip(self._rows[seqs], matchers, strict=True):
            if matcher is not None:
                matcher.fill(row[None])
        bits = self._bits[seqs]
        bits.copy_(self._host[seqs], non_blocking=True)
        allowed = ((bits[:, :, None] >> self._places) & 1).flatten(1)[:, : self._vocabulary].bool()
        return x.masked_fill(~allowed, -torch.inf)
