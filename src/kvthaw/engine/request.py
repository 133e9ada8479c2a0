"""What is asked of a running batch: a prompt, how to go on from it, and what came of it so far."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from kvthaw.cache.device_lengths import sent
from kvthaw.cache.swapped import Swapped
from kvthaw.engine.grammar import Matcher
from kvthaw.engine.logprobs import TokenLogprobs
from kvthaw.engine.sampling import GREEDY, Sampling
from kvthaw.engine.text import Detokenizer
from kvthaw.errors import ConfigError
from kvthaw.typecheck import check_type

if TYPE_CHECKING:
    from kvthaw.engine.hf import PreTrainedModel


class RequestOptions(TypedDict, total=False):
    """How to go on from a prompt.

    max_new_tokens: None for sampling.max_tokens, or as many as the capacity holds. stop: tokens that end it beside
    sampling.stop_token_ids, None for those of the model's generation config. tokenizer: transformers', which decodes
    `Request.text`; stop strings need one. text_after: tokens whose text that one goes on, such as the prompt; without any the text
    begins for itself. cache_salt: the prefix cache shares prompts of one salt alone. name: it keeps this
    prompt under a name, about: with what its entry says, as JSON. embeddings: [T, hidden], of the prompt's tokens in place of
    the model's own, such as of an image that some of them stand for; each token attends to those before it. Such a prompt
    shares no prefix, since token ids do not tell it apart.
    """

    max_new_tokens: int | None
    stop: int | Sequence[int] | None
    sampling: Sampling
    tokenizer: Any
    text_after: Sequence[int]
    cache_salt: str
    name: str | None
    about: Any
    embeddings: Tensor | None


@dataclass(eq=False, slots=True)
class Request:
    """A prompt and what is generated after it.

    seq: its place in the batch while it is there, else -1. prompt: its tokens, of which `prefilled` have come into the batch, the
    first `cached_tokens` of them from the prefix cache; tokens: those generated so far, of which `fed` have come too. finished:
    None while more will come; "stop" after a stop token (which is the last of tokens) or a stop string, "length" at its limit,
    "left" where it was taken out, "error" where its prefill failed, with `error`, which also says why its prompt could not get
    its name. stopped_by: the token or the string.

    text: the text so far where a tokenizer was given, without a stop token or string unless include_stop is set; piece: what the
    latest token added to it. Text that may become a stop string or is part of a character is held back until more is known. Tokens
    are decoded when one of the two is read, or as they come where stop strings are looked for.

    logprobs: of each of tokens; prompt_logprobs: of each of the prompt, None for its first; where sampling asks for them.
    """

    ids: Tensor = field(repr=False)
    limit: int
    stop: frozenset[int]
    sampling: Sampling
    salt: str = ""
    name: str | None = None
    about: Any = field(default=None, repr=False)
    embeddings: Tensor | None = field(default=None, repr=False)
    text_after: tuple[int, ...] = field(default=(), repr=False)
    seq: int = -1
    prefilled: int = 0
    cached_tokens: int = 0
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    finished: Literal["stop", "length", "left", "error"] | None = None
    stopped_by: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list, repr=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, repr=False)
    error: Exception | None = field(default=None, repr=False)
    decoded: Detokenizer | None = field(default=None, repr=False)
    scored: list[Tensor] = field(default_factory=list, repr=False)
    matcher: Matcher | None = field(init=False, repr=False)
    fetched: int = field(default=0, init=False, repr=False)  # tokens asked of the prefix cache's file
    swapped: Swapped | None = field(default=None, init=False, repr=False)  # its sequence, where it waits in host memory
    named: bool = field(default=False, init=False, repr=False)  # whether its prompt was whole and got its name, or could not
    _read: int = field(default=0, init=False, repr=False)  # tokens that were decoded
    _piece: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        grammar = self.sampling.grammar
        self.matcher = None if grammar is None else grammar.matcher(self.stop)

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.ids.shape[0]

    def place(self, seq: int, model: PreTrainedModel) -> None:
        """Give it a sequence of a model's batch."""
        embeddings = None if self.embeddings is None else self.embeddings.to(model.device, model.dtype)
        self.ids, self.embeddings, self.seq = sent(self.ids, model.device), embeddings, seq

    def inputs(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return what a model takes for tokens start .. stop of the prompt."""
        if self.embeddings is not None:
            return {"inputs_embeds": self.embeddings[None, start:stop]}
        return {"input_ids": self.ids[None, start:stop]}

    @property
    def text(self) -> str:
        """The text so far."""
        self._decode()
        return "" if self.decoded is None else self.decoded.text

    @property
    def piece(self) -> str:
        """What the latest token added to the text."""
        self._decode()
        return self._piece

    def decode(self, tokenizer: Any) -> None:
        """Decode its text with a tokenizer of transformers."""
        how = self.sampling
        self.decoded = Detokenizer(
            tokenizer, how.stop, include_stop=how.include_stop, min_tokens=how.min_tokens, after=self.text_after
        )

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.finished, self.error = "error", error
        self.drop_swapped()

    def drop_swapped(self) -> None:
        """Free the host memory that its sequence takes while it waits."""
        if self.swapped is not None:
            self.swapped.release()
            self.swapped = None

    def rewind(self) -> None:
        """Let its prompt, and its tokens, go through the model again; it keeps them."""
        self.drop_swapped()
        self.prefilled, self.cached_tokens, self.fetched, self.fed, self.scored = 0, 0, 0, 0, []
        if self.matcher is not None:
            self.matcher.reset()

    def take(self, token: int, scores: TokenLogprobs | None) -> bool:
        """Add a token, which may be the last one. Returns whether it is a new one: those that it has may come again."""
        new = self.fed == len(self.tokens)
        token = token if new else self.tokens[self.fed]
        if self.matcher is not None and not self.matcher.accept(token):
            self.fail(ConfigError("the model has no token with which its output could follow the grammar any further"))
            return True
        if new:
            self._add(token, scores)
        return new

    def _add(self, token: int, scores: TokenLogprobs | None) -> None:
        self.tokens.append(token)
        n = self.sampling.logprobs
        if scores is not None and n is not None:
            self.logprobs.append(replace(scores, top=scores.top[:n]))
        if token in self.stop:
            self.finished, self.stopped_by = "stop", token
        elif len(self.tokens) == self.limit:
            self.finished = "length"
        if self.sampling.stop:
            self._decode()

    def _decode(self) -> None:
        """Decode the tokens that have come since it was called last."""
        decoded = self.decoded
        while decoded is not None and self._read < len(self.tokens):
            token = self.tokens[self._read]
            self._read += 1
            last = self._read == len(self.tokens) and self.finished in ("stop", "length")
            hidden = last and self.finished == "stop" and not self.sampling.include_stop
            self._piece = "" if hidden else decoded.push(token)
            if decoded.stopped_by is not None:
                self.finished, self.stopped_by = "stop", decoded.stopped_by
            elif last:
                self._piece += decoded.finish()


def check_embeddings(embeddings: Tensor, tokens: int, model: PreTrainedModel, name: str | None) -> None:
    """Raise ConfigError where embeddings cannot stand for so many tokens of a prompt that a model is given."""
    check_type(Tensor, embeddings=embeddings)
    text = model.config.get_text_config(decoder=True)
    if tuple(embeddings.shape) != (tokens, text.hidden_size):
        raise ConfigError(
            f"embeddings have the shape {tuple(embeddings.shape)}; they must have {(tokens, text.hidden_size)}: one row for each "
            "token of the prompt"
        )
    if getattr(text, "hidden_size_per_layer_input", None):
        raise ConfigError(f"embeddings are given; {type(model).__name__} also needs the tokens' own inputs of each layer")
    asks = [
        one for one in signature(type(model).forward).parameters if one.endswith("token_type_ids") or one == "image_grid_thw"
    ]
    if asks and text is not model.config:
        raise ConfigError(
            f"embeddings are given; {type(model).__name__} asks which tokens are an image's ({', '.join(asks)}): they attend both "
            "ways or have positions of their own, which a running batch does not serve; attach() and generate() do"
        )
    if name is not None:
        raise ConfigError(f"name is {name!r} and embeddings are given; prompts are kept by their token ids")


def hidden_salt(cache_salt: str) -> str:
    """Return what stands for a tenant's salt in the prefix cache and in files: "" for none, else a digest."""
    return hashlib.sha256(f"cache_salt {cache_salt}".encode("utf-8", "surrogatepass")).hexdigest() if cache_salt else ""


def new_request(
    prompt: Tensor | Sequence[int], model: PreTrainedModel, capacity: int, vocabulary: int, **how: Unpack[RequestOptions]
) -> Request:
    """Make a request of a model's batch with room for `capacity` tokens a sequence; see `Batch.request`."""
    max_new_tokens, sampling, tokenizer = how.get("max_new_tokens"), how.get("sampling", GREEDY), how.get("tokenizer")
    if isinstance(prompt, str):
        raise ConfigError(f"the prompt is text, {prompt[:20]!r}; it must be token ids, as a tokenizer makes them")
    ids = torch.as_tensor(prompt, dtype=torch.int64).reshape(-1)
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
        raise ConfigError(
            f"the prompt has {tokens} tokens and max_new_tokens is {wanted}; a sequence has room for {capacity} in all"
        )
    if sampling.min_tokens > limit:
        raise ConfigError(f"min_tokens is {sampling.min_tokens}; it must be at most {limit}, the tokens that may come")
    if sampling.stop and tokenizer is None:
        raise ConfigError(f"stop is {sampling.stop!r}; stop strings need a tokenizer")
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocabulary:  # on a GPU the whole batch would be lost
        raise ConfigError(f"the prompt has token ids from {least} to {most}; the model's are 0 to {vocabulary - 1}")
    stop, salt = how.get("stop"), hidden_salt(how.get("cache_salt", ""))
    if stop is None and not sampling.ignore_eos:
        stop = getattr(model.generation_config, "eos_token_id", None)
    own = () if stop is None else [stop] if isinstance(stop, int) else stop
    if (embeddings := how.get("embeddings")) is not None:
        check_embeddings(embeddings, tokens, model, how.get("name"))
    ends = frozenset([*own, *sampling.stop_token_ids])
    request = Request(
        ids, limit, ends, sampling, salt, how.get("name"), how.get("about"), embeddings, tuple(how.get("text_after", ()))
    )
    if tokenizer is not None:
        request.decode(tokenizer)
    return request
