"""Constrained output: bit masks on the device of the tokens that a grammar allows next. xgrammar provides JSON and tool calls."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvthaw.engine.json_schema import check_schema, plain_patterns
from kvthaw.engine.text import special_tokens
from kvthaw.engine.tool_calls import SPECIAL, CallRules, ToolFormat
from kvthaw.errors import ConfigError

Source = str
"""A grammar as text: a structural tag of xgrammar, in JSON."""
_COUNTED, _WITHOUT_CONTROLS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""A character of a counted string as xgrammar writes it, and as JSON allows it."""
_THREADS = 3
_CACHED_BYTES = 64 << 20  # limit for compiled grammars
MOST_TRIES = 150_000_000
"""Limit on how often compiling a schema may try a token, which is most of its time: less than a minute on one core."""
_LEAST_VOCABULARY = 4096  # compiling a state costs as much as trying this many tokens


class Grammar:
    """A compiled grammar for one tokenizer. Any number of outputs may follow it.

    source: from which `Grammars.compile` can compile it in another process.
    """

    def __init__(self, compiled: Any, vocabulary: int, source: Source) -> None:
        self._compiled, self.vocabulary, self.source = compiled, vocabulary, source
        self.bytes = int(compiled.memory_size_bytes)

    def matcher(self, stops: Collection[int]) -> Any:
        """Return a matcher of xgrammar for an output that ends with one of the tokens `stops`.

        Raises ConfigError if there are none.
        """
        import xgrammar

        if not stops:
            raise ConfigError(
                "ignore_eos is set or the model has no end-of-sequence token; a grammar needs a token to end with"
            )
        return xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=sorted(stops))


class Grammars:
    """Compile grammars for a transformers tokenizer and a model of `vocabulary` tokens, and cache the latest.

    JSON has the layout of json.dumps, so no token is spent on white space. Raises ConfigError if xgrammar is missing.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        try:
            import xgrammar
        except ImportError:
            raise ConfigError("JSON output needs xgrammar, which is not installed: pip install 'kvthaw[serve]'") from None
        known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[0])
        shown = special_tokens(tokenizer, SPECIAL).keys()
        hidden = set(tokenizer.all_special_ids) - shown  # decoding the output leaves them out
        texts = [b"" if token in hidden else text for token, text in enumerate(known.decoded_vocab)]
        info = xgrammar.TokenizerInfo(texts, vocab_size=vocabulary, stop_token_ids=[])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHED_BYTES)
        self._convert = xgrammar.Grammar.from_json_schema
        self._vocabulary, self._lock = vocabulary, threading.Lock()
        self._kept: OrderedDict[Source, Grammar] = OrderedDict()  # the most recently used last

    def read(self, schema: Any, *, strict: bool = False) -> tuple[Source, int]:
        """Return the source of a schema's grammar, and how often compiling it tries a token.

        Raises ConfigError for an unsupported schema, see `check_schema`, and for one that takes too long to compile.

        strict: objects have only the members that the schema names.
        """
        written, tries = self._written(schema, strict=strict)
        return _source({"type": "grammar", "grammar": written}), tries

    def read_calls(self, form: ToolFormat, rules: CallRules) -> tuple[Source, int]:
        """Return the source of the grammar of an output with calls, and how often compiling it tries a token. Raises ConfigError
        as read() does."""
        tries, arguments = 0, dict[str, str]()
        for name, (schema, strict) in rules.functions.items():
            try:
                if schema.get("type") != "object":
                    raise ConfigError('their schema must have the type "object"')
                arguments[name], takes = self._written(schema, strict=strict)
            except ConfigError as error:
                raise ConfigError(f"the parameters of {name!r}: {error}") from None
            tries += takes
            if tries > MOST_TRIES:
                raise ConfigError(f"the parameters of all functions together take too long to compile, from {name!r} on")
        return _source(form.grammar(rules, arguments)), tries

    def _written(self, schema: Any, *, strict: bool) -> tuple[str, int]:
        """Return the grammar of a schema as text, and how often compiling it tries a token."""
        passes, tokens = check_schema(schema), max(self._vocabulary, _LEAST_VOCABULARY)
        if passes > (most := MOST_TRIES // tokens):
            raise ConfigError(
                f"json_schema takes {round(passes)} passes over a vocabulary of {self._vocabulary} tokens to compile; "
                f"it may take {most}. A minLength or maxLength above 128 takes 192, a pattern one for each way on in it"
            )
        with _explained():
            written = str(self._convert(json.dumps(plain_patterns(schema)), any_whitespace=False, strict_mode=strict))
        return written.replace(_COUNTED, _WITHOUT_CONTROLS), round(passes * tokens)

    def known(self, source: Source) -> Grammar | None:
        """Return a grammar from the cache, if it is there."""
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
            return self._kept.get(source)

    def compile(self, source: Source) -> Grammar:
        """Return the grammar of a source. Raises ConfigError if nothing can satisfy it."""
        if (known := self.known(source)) is not None:
            return known
        with _explained():
            made = Grammar(self._compiler.compile_structural_tag(source), self._vocabulary, source)
        with self._lock:
            self._kept[source] = made
            while len(self._kept) > 1 and sum(one.bytes for one in self._kept.values()) > _CACHED_BYTES:
                self._kept.popitem(last=False)
        return made


class ComingGrammars:
    """Compile grammars on background threads, before they are needed.

    make: makes the compiler when it is first needed.
    """

    def __init__(self, make: Callable[[], Grammars]) -> None:
        self._make, self._made, self._lock = make, list[Grammars](), threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "kvthaw-grammar")
        self._coming: dict[Source, Future[Grammar]] = {}

    def begin(self, source: Source) -> None:
        """Start to compile a grammar that will be needed."""
        # the rest is in the cache of Grammars
        self._coming = {known: coming for known, coming in self._coming.items() if not coming.done()}
        if source not in self._coming:
            self._coming[source] = self._threads.submit(self._compile, source)

    def get(self, source: Source) -> Grammar:
        """Return a grammar. Waits only if it is still being compiled, or has left the cache."""
        self.begin(source)
        return self._coming[source].result()

    def _compile(self, source: Source) -> Grammar:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
        return self._made[0].compile(source)


def _source(output: dict[str, Any]) -> Source:
    """Return the source of an output's format."""
    return json.dumps({"type": "structural_tag", "format": output})


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"json_schema cannot be met: {_why(error)}") from None


def _why(error: Exception) -> str:
    """Return xgrammar's error message for a schema, without locations in its code and in the grammar that it made."""
    said = re.sub(r"^\[[\d:]+\] \S+:\d+: |EBNF parser error at line \d+, column \d+: ", "", str(error)).strip()
    return "xgrammar makes no grammar of it" if not said or "Check failed" in said else said


class TokenMasks:
    """Bit masks of the tokens that may come next in each sequence of a running batch; all tokens for a sequence without a
    matcher.

    The host computes the bits while the device computes the logits, and copies them from pinned memory. A step therefore
    does not wait for the device.
    """

    def __init__(self, seqs: int, vocabulary: int, device: torch.device) -> None:
        self._matchers: list[Any] = [None] * seqs
        self._vocabulary = vocabulary
        shape = seqs, -(-vocabulary // 32)
        with torch.inference_mode(False):
            self._host = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._bits = torch.full(shape, -1, dtype=torch.int32, device=device)
            self._places = torch.arange(32, dtype=torch.int32, device=device)
        self._rows = self._host.numpy()

    def join(self, seq: int, matcher: Any) -> None:
        """Set the matcher of a sequence; None allows any token."""
        self._matchers[seq] = matcher
        self._rows[seq] = -1

    def __call__(self, x: Tensor, seqs: slice) -> Tensor:
        """Return logits [B, V] of these sequences, with -inf for tokens that may not come."""
        matchers = self._matchers[seqs]
        if not any(matchers):
            return x
        for row, matcher in zip(self._rows[seqs], matchers, strict=True):
            if matcher is not None:
                matcher.fill_next_token_bitmask(row[None])
        bits = self._bits[seqs]
        bits.copy_(self._host[seqs], non_blocking=True)
        allowed = ((bits[:, :, None] >> self._places) & 1).flatten(1)[:, : self._vocabulary].bool()
        return x.masked_fill(~allowed, -torch.inf)
