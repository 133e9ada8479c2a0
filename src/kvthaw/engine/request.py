"""A request of a running batch: what is asked for, and how far it is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from kvthaw.cache.layer_base import SequenceState
from kvthaw.engine.logprobs import TokenLogprobs
from kvthaw.engine.sampling import GREEDY, Sampling
from kvthaw.engine.text import Detokenizer
from kvthaw.engine.tool_calls import SPECIAL
from kvthaw.errors import ConfigError, TooLongError
from kvthaw.kernels.gpu import sent
from kvthaw.typecheck import check_type

if TYPE_CHECKING:
    from kvthaw.engine.hf import PreTrainedModel


class RequestOptions(TypedDict, total=False):
    """How to continue a prompt.

    max_new_tokens: None: sampling.max_tokens, or all that the capacity allows.
    stop: token ids that end the output, besides sampling.stop_token_ids. None: the ones of the model's generation config.
    tokenizer: a transformers tokenizer, which decodes `Request.text`. Stop strings need one.
    text_after: tokens whose text the output continues, such as the prompt; without them the text is tokenized as a
        beginning.
    cache_salt: the prefix cache shares prompts only within a salt.
    client: whom the request is for. A `Scheduler` shares slots and prefill between clients.
    name: the prefix cache keeps this prompt under a name.
    about: any JSON value, kept with the name.
    """

    max_new_tokens: int | None
    stop: int | Sequence[int] | None
    sampling: Sampling
    tokenizer: Any
    text_after: Sequence[int]
    cache_salt: str
    client: str
    name: str | None
    about: Any


@dataclass(frozen=True, eq=False, slots=True)
class RequestSpec:
    """What is asked for, checked; see `Batch.request` and `RequestOptions`.

    ids: [T] int64, the prompt, on the CPU.
    limit: most tokens of the output.
    stop: token ids that end it.
    salt: digest of the cache_salt.
    """

    ids: Tensor = field(repr=False)
    limit: int
    stop: frozenset[int]
    sampling: Sampling
    salt: str = ""
    client: str = ""
    name: str | None = None
    about: Any = field(default=None, repr=False)
    text_after: tuple[int, ...] = field(default=(), repr=False)
    tokenizer: Any = field(default=None, repr=False)

    @property
    def shares_forward(self) -> bool:
        """Whether the prompt may share a forward with others: no log-probabilities of it are asked."""
        return self.sampling.prompt_logprobs is None


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and its output.

    spec: what is asked for.
    seq: its slot in the batch; -1 without one.
    prompt: number of tokens of the prompt.
    prefilled: prompt tokens that are in the batch.
    cached_tokens: prompt tokens that the prefix cache had when the request first got a slot.
    filled: prompt tokens that came from the prefix cache into the slot, its own of before it was preempted included.
    tokens: output tokens so far.
    fed: output tokens that are in the batch.
    unread: output tokens that were launched and that the host has not read; see Batch.read.
    arrived: number of its arrival in the batch.
    decodes: whether steps decode it: its prompt is prefilled and indexed.
    checked: whether its prompt is in the batch, known to be finite.
    finished: None while more will come. "stop" after a stop token (the last of tokens) or a stop string. "length" at its
        limit, "left" if it was removed, "error" if its prefill failed.
    error: the exception of "error", or the reason why its prompt was not named.
    stopped_by: the stop token or stop string.
    logprobs: of each output token, if requested.
    prompt_logprobs: of each prompt token, if requested; None for its first.
    matcher: follows the output through its grammar; None without one.
    ids: [1, T] int64, the prompt on the device, once it has a slot.
    """

    spec: RequestSpec
    seq: int = -1
    prompt: int = field(init=False)
    prefilled: int = 0
    cached_tokens: int = 0
    filled: int = 0
    fed: int = 0
    unread: int = 0
    arrived: int = 0
    decodes: bool = False
    checked: bool = False
    tokens: list[int] = field(default_factory=list)
    finished: Literal["stop", "length", "left", "error"] | None = None
    stopped_by: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, repr=False)
    error: Exception | None = field(default=None, repr=False)
    matcher: Any = field(init=False, repr=False)
    ids: Tensor = field(init=False, repr=False)
    fetched: int = field(default=0, init=False, repr=False)  # prompt tokens requested from the prefix cache's file
    swapped: SequenceState | None = field(default=None, init=False, repr=False)  # its state while it is swapped out
    begun: bool = field(default=False, init=False, repr=False)  # whether it has had a slot
    named: bool = field(default=False, init=False, repr=False)  # whether naming its complete prompt was tried
    _out: Detokenizer | None = field(default=None, init=False, repr=False)
    _read: int = field(default=0, init=False, repr=False)  # number of decoded tokens
    _piece: str = field(default="", init=False, repr=False)  # text of the last of them

    def __post_init__(self) -> None:
        spec, how = self.spec, self.spec.sampling
        self.prompt = spec.ids.shape[0]
        self.matcher = None if how.grammar is None else how.grammar.matcher(spec.stop)
        if spec.tokenizer is not None:
            show = how.show_tokens if how.grammar is None else (*how.show_tokens, *SPECIAL)  # text of its tokens
            given: dict[str, Any] = {"include_stop": how.include_stop, "min_tokens": how.min_tokens, "show": show}
            self._out = Detokenizer(spec.tokenizer, how.stop, after=spec.text_after, **given)

    @property
    def reusable(self) -> int:
        """Number of the prompt's first tokens whose KV may come from the prefix cache. Where log-probabilities are asked, these
        are the tokens that have theirs."""
        scored = self.spec.sampling.prompt_logprobs is not None and not self.tokens
        return max(0, len(self.prompt_logprobs) - 1) if scored else self.prompt

    @property
    def known(self) -> int:
        """The next token to feed; -1 if the host has not read it."""
        return self.tokens[self.fed] if self.fed < len(self.tokens) else -1

    def place(self, seq: int, model: PreTrainedModel) -> None:
        """Put the request into a slot of a model's batch."""
        self.seq, self.ids = seq, sent(self.spec.ids, model.device)[None]

    @property
    def text(self) -> str:
        """The text so far, if a tokenizer was given. It excludes a stop token or string unless include_stop is set."""
        self.decode()
        return "" if self._out is None else self._out.text

    def decode(self) -> str:
        """Decode tokens that are not decoded yet. Returns the text that the latest token added.

        Text that may become a stop string, and incomplete characters, are held back. With stop strings tokens are decoded as
        they come.
        """
        while self._out is not None and self._read < len(self.tokens):
            token = self.tokens[self._read]
            self._read += 1
            last = self._read == len(self.tokens) and self.finished in ("stop", "length")
            hidden = last and self.finished == "stop" and not self.spec.sampling.include_stop
            self._piece = "" if hidden else self._out.push(token)
            if self._out.stopped_by is not None:
                self.finished, self.stopped_by = "stop", self._out.stopped_by
            elif last:
                self._piece += self._out.finish()
        return self._piece

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.finished, self.error = "error", error
        self.drop_swapped()

    def drop_swapped(self) -> None:
        """Free the host memory of its swapped-out state."""
        if self.swapped is not None:
            self.swapped.release()
            self.swapped = None

    def rewind(self) -> None:
        """Reset its progress: prompt and output tokens go through the model again. Keeps the tokens."""
        self.drop_swapped()
        self.prefilled, self.filled, self.fetched, self.fed, self.checked = 0, 0, 0, 0, False
        if self.matcher is not None:
            self.matcher.reset()

    def take(self, token: int, scores: TokenLogprobs | None, at: int) -> bool:
        """Append a token, which may be the last. Returns whether it is new: a restarted request gets its tokens again.

        at: its index in the output.
        """
        new, spec = at == len(self.tokens), self.spec
        token = token if new else self.tokens[at]
        if self.matcher is not None and not self.matcher.accept_token(token):
            self.fail(ConfigError("no token of the model can continue the output as the grammar requires"))
            return True
        if not new:
            return False
        self.tokens.append(token)
        if scores is not None and spec.sampling.logprobs is not None:
            self.logprobs.append(replace(scores, top=scores.top[: spec.sampling.logprobs]))
        if token in spec.stop:
            self.finished, self.stopped_by = "stop", token
        elif len(self.tokens) == spec.limit:
            self.finished = "length"
        if spec.sampling.stop:
            self.decode()
        return True


def hidden_salt(cache_salt: str) -> str:
    """Return a digest of a tenant's salt for the prefix cache and files; "" for none."""
    return hashlib.sha256(f"cache_salt {cache_salt}".encode("utf-8", "surrogatepass")).hexdigest() if cache_salt else ""


def checked_spec(
    prompt: Tensor | Sequence[int], model: PreTrainedModel, capacity: int, vocabulary: int, **how: Unpack[RequestOptions]
) -> RequestSpec:
    """Return what is asked for, from a model with room for `capacity` tokens per sequence. Raises as `Batch.request` does."""
    for name in how.keys() - RequestOptions.__annotations__:
        raise ConfigError(f"a request has no option {name!r}; there are {', '.join(RequestOptions.__annotations__)}")
    max_new_tokens, sampling, tokenizer = how.get("max_new_tokens"), how.get("sampling", GREEDY), how.get("tokenizer")
    check_type(str, client=how.get("client", ""))
    if isinstance(prompt, str):
        raise ConfigError(f"the prompt is text, {prompt[:20]!r}; it must be token ids, as a tokenizer makes them")
    ids = torch.as_tensor(prompt, dtype=torch.int64, device="cpu").reshape(-1)
    tokens = ids.shape[0]
    if max_new_tokens is not None and sampling.max_tokens is not None:
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens} and max_tokens of sampling {sampling.max_tokens}; give one of them"
        )
    wanted = sampling.max_tokens if max_new_tokens is None else max_new_tokens
    limit = capacity - tokens if wanted is None else wanted
    if tokens < 1:
        raise ConfigError("the prompt is empty")
    if limit < 1 or tokens + limit > capacity:
        raise TooLongError(tokens, wanted, capacity)
    if sampling.min_tokens > limit:
        raise ConfigError(f"min_tokens is {sampling.min_tokens}; it must be at most {limit}, the tokens that may come")
    if sampling.stop and tokenizer is None:
        raise ConfigError(f"stop is {sampling.stop!r}; stop strings need a tokenizer")
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocabulary:  # on a GPU an invalid id would destroy the whole batch
        raise ConfigError(f"the prompt has token ids from {least} to {most}; the model's are 0 to {vocabulary - 1}")
    stop, salt = how.get("stop"), hidden_salt(how.get("cache_salt", ""))
    if stop is None and not sampling.ignore_eos:
        stop = getattr(model.generation_config, "eos_token_id", None)
    own = () if stop is None else [stop] if isinstance(stop, int) else stop
    return RequestSpec(
        ids,
        limit,
        frozenset([*own, *sampling.stop_token_ids]),
        sampling,
        salt=salt,
        client=how.get("client", ""),
        name=how.get("name"),
        about=how.get("about"),
        text_after=tuple(how.get("text_after", ())),
        tokenizer=tokenizer,
    )
