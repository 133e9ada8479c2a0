"""Sample the next token of each sequence on the device: penalties, temperature, top-k, top-p, min-p, seeds, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvthaw.counter_rng import gumbel
from kvthaw.engine.grammar import Grammar, TokenMasks
from kvthaw.engine.logprobs import TOPK, Drawn, score, top
from kvthaw.errors import ConfigError, at_least, within
from kvthaw.kernels.gpu import sent, upload
from kvthaw.typecheck import check_type

_MOST = (1 << 63) - 1
"""The largest value of an int64 tensor."""
_LARGEST = torch.finfo(torch.float32).max  # a logit that a penalty makes larger counts as this one
_COLDEST = 1e-6  # smaller positive temperatures count as this one


def _whole(least: int, most: int | None = None, **values: int | None) -> None:
    """Raise ConfigError for the first field that is no integer from least to most. Fields that are None pass."""
    check_type(int, **{name: value for name, value in values.items() if value is not None})
    if most is None:
        at_least(least, **values)
    else:
        within(least, most, **values)


def _within(least: float, most: float, **values: float) -> None:
    """Raise ConfigError for the first field that is no finite number from least to most."""
    check_type(float, **values)
    within(least, most, **values)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of a request are sampled, when it ends, and which log-probabilities it reports.

    Penalties and biases apply before the temperature, in the order listed here. Raises ConfigError for a value out of
    range.

    temperature: 0 is greedy.
    top_k: only the k likeliest tokens may be drawn.
    top_p: a token may be drawn if the likelier tokens have less than top_p of the probability.
    min_p: a token may be drawn if it has at least min_p times the probability of the likeliest. Each of these three is
        judged over the whole distribution; equal logits rank by the lowest id.
    seed: the same seed draws the same tokens, whatever other requests are in the batch.

    logit_bias: added to the logits of these tokens.
    repetition_penalty: divides positive logits of tokens in prompt and output, and multiplies negative ones (CTRL; Keskar
        et al., 2019).
    frequency_penalty, presence_penalty: subtracted from a token's logit for each occurrence in the output, or once.

    max_tokens: None: all that fit.
    min_tokens: no stop token or stop string ends the output before this number of tokens.
    stop_token_ids: end the output, besides the model's end-of-sequence tokens.
    ignore_eos: ignore the model's end-of-sequence tokens.
    stop: strings that end the output. The text ends before the stop string.
    include_stop: the text ends after the stop string.
    show_tokens: names of special tokens that the text does not leave out.
    logprobs: report the log-probability of each sampled token and of this many likeliest tokens. They are the model's,
        before any setting above. None: report none.
    prompt_logprobs: the same for the tokens of the prompt.
    grammar: the output follows it, and ends where it does.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    include_stop: bool = False
    show_tokens: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "show_tokens", "stop_token_ids", "logit_bias"):
            value = getattr(self, name)
            plain = dict(value) if isinstance(value, Mapping) else (value,) if isinstance(value, str | int) else tuple(value)
            object.__setattr__(self, name, plain)
        check_type(bool, ignore_eos=self.ignore_eos, include_stop=self.include_stop)
        check_type(tuple[int, ...], stop_token_ids=self.stop_token_ids)
        check_type(tuple[str, ...], stop=self.stop, show_tokens=self.show_tokens)
        check_type(dict, logit_bias=self.logit_bias)
        if "" in self.stop:
            raise ConfigError(f"stop is {self.stop!r}; a stop string must have at least one character")
        _whole(1, top_k=self.top_k, max_tokens=self.max_tokens)
        _whole(0, min_tokens=self.min_tokens, logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs)
        _whole(-_MOST - 1, _MOST, seed=self.seed, top_k=self.top_k, max_tokens=self.max_tokens, min_tokens=self.min_tokens)
        _within(0, math.inf, temperature=self.temperature)
        _within(0, 1, min_p=self.min_p)
        _within(-2, 2, frequency_penalty=self.frequency_penalty, presence_penalty=self.presence_penalty)
        for name, number in (("top_p", self.top_p), ("repetition_penalty", self.repetition_penalty)):
            _within(0, 1 if name == "top_p" else math.inf, **{name: number})
            if number == 0:
                raise ConfigError(f"{name} is 0; it must be above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}")
        if self.grammar is not None and self.min_tokens:
            raise ConfigError(f"min_tokens is {self.min_tokens}; it must be 0 where a grammar says when the output ends")
        for token, bias in self.logit_bias.items():
            _whole(0, **{"a token of logit_bias": token})
            _within(-100, 100, **{f"logit_bias of token {token}": bias})

    def split(self, n: int) -> list[Sampling]:
        """Return settings for n outputs of one prompt, which differ in their seeds: the i-th has seed + i."""
        _whole(1, n=n)
        return [self, *(replace(self, seed=(self.seed + i + (1 << 63)) % (1 << 64) - (1 << 63)) for i in range(1, n))]

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


GREEDY = Sampling()


class Sampler:
    """Sample the tokens of a running batch, each sequence with its own settings.

    Settings and state (token counts, prompt tokens, biases) are tensors on the device. A join writes the state, and the next
    draw writes all changed settings in one copy. Tensors of V numbers per sequence are allocated when a request first needs
    them. Between joins a step reads the same tensors, launches the same kernels and never waits for the device, so it can be
    captured.

    A draw is the argmax of the allowed logits / temperature plus Gumbel noise. The noise is a hash of (seed, position,
    token), so it needs no state, and a sequence draws the same tokens in any batch.

    Cost for B sequences of V tokens, besides an argmax: none if all are greedy. Without top_k and top_p, about 30
    elementwise passes over [B, V]. With top_k up to TOPK, one torch.topk over int64 keys [B, V] and a sum of exponentials;
    everything else is [B, top_k]. top_p without such a top_k sorts [B, V]. Only sequences that need these pay for them.
    Penalties, biases and log-probabilities add about 10 passes over all B each.
    """

    def __init__(self, seqs: int, vocabulary: int, device: torch.device | str = "cpu") -> None:
        self.seqs, self.vocabulary, self.device = seqs, vocabulary, torch.device(device)
        self._samplings = [GREEDY] * seqs
        self._free = [0] * seqs  # the first position of each sequence at which a stop token may come
        with torch.inference_mode(False):  # tensors that are written in place later must be plain tensors
            self._table = sent(_table([*zip(self._samplings, self._free, range(seqs), strict=True)])[:, :-1], self.device)
        self._numbers, self._seeds, self._free_from = self._table.view(torch.float64)[:, :-2], *self._table[:, -2:].unbind(1)
        self._written, self._changed = [(GREEDY, 0)] * seqs, set[int]()  # what the table has; sequences that may differ
        # [S, V] each once a sequence needs it, until then empty
        self._counts = torch.empty(0, dtype=torch.int32)  # in the output
        self._prompt = self._stops = torch.empty(0, dtype=torch.bool)
        self._bias = torch.empty(0)
        self._masks: TokenMasks | None = None
        # by range of sequences, since the last change of settings
        self._groups: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}

    def join(
        self,
        seq: int,
        sampling: Sampling,
        prompt: Tensor | Sequence[int] = (),
        stops: Iterable[int] = (),
        matcher: Any = None,
        output: Sequence[int] = (),
    ) -> None:
        """Set the settings of a sequence and drop its former state.

        Raises ConfigError, before anything has changed, for invalid tokens and for more logprobs than the model has tokens.

        prompt: token ids.
        stops: tokens that min_tokens holds back.
        matcher: of its grammar; None without one.
        output: tokens that it has already.
        """
        stops = sorted(stops)
        self.check(sampling, stops)
        self._samplings[seq], self._free[seq] = sampling, len(prompt) + sampling.min_tokens if sampling.min_tokens else 0
        self._changed.add(seq)
        if sampling.penalized:
            prompt = sent(torch.as_tensor(prompt, dtype=torch.int64), self.device)
            self._counts = self._cleared(self._counts, seq)
            self._prompt = self._cleared(self._prompt, seq)
            self._prompt[seq].index_fill_(0, prompt, True)
            given = upload(output, torch.int64, self.device)
            self._counts[seq].index_add_(0, given, torch.ones_like(given, dtype=torch.int32))
        if sampling.logit_bias:
            self._bias = self._cleared(self._bias, seq)
            tokens, bias = zip(*sampling.logit_bias.items(), strict=True)
            self._bias[seq, upload(tokens, torch.int64, self.device)] = upload(bias, torch.float32, self.device)
        elif len(self._bias):
            self._bias[seq].zero_()
        if sampling.min_tokens:
            self._stops = self._cleared(self._stops, seq)
            self._stops[seq].index_fill_(0, upload(stops, torch.int64, self.device), True)
        if matcher is not None and self._masks is None:
            self._masks = TokenMasks(self.seqs, self.vocabulary, self.device)
        if self._masks is not None:
            self._masks.join(seq, matcher)
        self._groups.clear()

    def leave(self, seq: int) -> None:
        """Reset a sequence to greedy settings, so that it costs nothing."""
        self.join(seq, GREEDY)

    def move(self, seq: int, to: int) -> None:
        """Move a sequence without a grammar to a free place."""
        self._samplings[to], self._free[to] = self._samplings[seq], self._free[seq]
        self._changed.add(to)
        for state in (self._counts, self._prompt, self._stops, self._bias):
            if len(state):
                state[to].copy_(state[seq])
        self.leave(seq)

    def check(self, sampling: Sampling, stops: Iterable[int] = ()) -> None:
        """Raise ConfigError for invalid token ids and for more logprobs than the model has tokens."""
        for name, tokens in (
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
            ("stop", stops if sampling.min_tokens else ()),
        ):
            for token in tokens:
                _whole(0, self.vocabulary - 1, **{f"a token of {name}": token})
        _whole(0, self.vocabulary, logprobs=sampling.logprobs, prompt_logprobs=sampling.prompt_logprobs)
        if sampling.grammar is not None and sampling.grammar.vocabulary != self.vocabulary:
            raise ConfigError(f"grammar is of {sampling.grammar.vocabulary} tokens; the model has {self.vocabulary}")

    def __call__(self, logits: Tensor, positions: Tensor, seqs: slice = slice(None)) -> Drawn:
        """Sample the next tokens of these sequences and count them.

        logits: [B, V], the model's.
        positions: [B] int64, the positions of the new tokens. A prompt of T tokens has positions 0 to T - 1.
        """
        self._write()
        samplings, (first, stop, _) = self._samplings[seqs], seqs.indices(self.seqs)
        groups = self._groups.get((first, stop))
        if groups is None:
            groups = self._groups[first, stop] = _groups(samplings, self.vocabulary, self.device)
        x = self._processed(logits, positions, seqs, samplings)
        if self._masks is not None:
            x = self._masks(x, seqs)
        tokens = _choose(x, positions, self._numbers[seqs], self._seeds[seqs], groups)
        if len(self._counts):
            ones = torch.ones_like(tokens, dtype=torch.int32)
            self._counts[seqs].scatter_add_(1, tokens[:, None], ones[:, None])
        asked = [one.logprobs for one in samplings if one.logprobs is not None]
        return Drawn(tokens, score(logits, tokens, max(asked)) if asked else None)

    def _write(self) -> None:
        """Copy changed settings to the device."""
        now = [(self._samplings[seq], self._free[seq], seq) for seq in sorted(self._changed)]
        rows = [(sampling, free, seq) for sampling, free, seq in now if self._written[seq] != (sampling, free)]
        if rows:
            new = sent(_table(rows), self.device)
            self._table.index_copy_(0, new[:, -1], new[:, :-1])
            for sampling, free, seq in rows:
                self._written[seq] = sampling, free
        self._changed.clear()  # or a draw that failed writes them again

    def _processed(self, logits: Tensor, positions: Tensor, seqs: slice, samplings: Sequence[Sampling]) -> Tensor:
        """Return logits after bias, penalties and held-back stop tokens; unchanged if there are none."""
        penalized, biased = any(one.penalized for one in samplings), any(one.logit_bias for one in samplings)
        waiting = any(one.min_tokens for one in samplings)
        if not (penalized or biased or waiting):
            return logits
        x = logits.double()
        if biased:
            x = x + self._bias[seqs]
        if penalized:
            counts, numbers = self._counts[seqs], self._numbers[seqs]
            repetition, frequency, presence = numbers[:, 4:, None].unbind(1)
            seen = self._prompt[seqs] | (counts > 0)
            x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
            x = (x - frequency * counts - presence * (counts > 0)).clamp(-_LARGEST, _LARGEST)
        if waiting:
            x = x.masked_fill(self._stops[seqs] & (positions < self._free_from[seqs])[:, None], -torch.inf)
        return x if logits.dtype == torch.float64 else x.float()

    def _cleared(self, state: Tensor, seq: int) -> Tensor:
        if not len(state):
            with torch.inference_mode(False):
                return torch.zeros(self.seqs, self.vocabulary, dtype=state.dtype, device=self.device)
        state[seq].zero_()
        return state


def _table(rows: Sequence[tuple[Sampling, int, int]]) -> Tensor:
    """Return settings of sequences as a tensor [S, 10] int64: the bits of seven float64, and three integers.

    rows: of each sequence its settings, the first position at which a stop token may come, and its number.
    """
    numbers = [
        (
            max(one.temperature, _COLDEST),
            math.inf if one.top_k is None else one.top_k,
            math.inf if one.top_p == 1 else one.top_p,  # rounded sums may exceed 1 before the last token
            math.log(one.min_p) if one.min_p else -math.inf,
            one.repetition_penalty,
            one.frequency_penalty,
            one.presence_penalty,
        )
        for one, _, _ in rows
    ]
    integers = torch.tensor([(one.seed, free, seq) for one, free, seq in rows], dtype=torch.int64)
    return torch.cat((torch.tensor(numbers, dtype=torch.float64).view(torch.int64), integers), dim=1)


def _groups(samplings: Sequence[Sampling], vocabulary: int, device: torch.device) -> list[tuple[int, Tensor]]:
    """Group the sequences that draw, as pairs (width, sequences): rank this many of the likeliest tokens, 0 for none."""
    ranks = {seq: min(one.top_k or vocabulary, vocabulary) for seq, one in enumerate(samplings) if one.temperature}
    plain = [seq for seq, k in ranks.items() if k == vocabulary and samplings[seq].top_p == 1]
    short = [seq for seq, k in ranks.items() if k <= TOPK and seq not in plain]
    long = [seq for seq, k in ranks.items() if k > TOPK and seq not in plain]
    widest = max((ranks[seq] for seq in short), default=1)
    widths = (0, min(1 << (widest - 1).bit_length(), vocabulary), vocabulary)  # few widths, so that there are few captures
    rows = zip(widths, (plain, short, long), strict=True)
    return [(width, upload(seqs, torch.int64, device)) for width, seqs in rows if seqs]


def _choose(x: Tensor, positions: Tensor, numbers: Tensor, seeds: Tensor, groups: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return the likeliest token of each row [B, V], or a drawn one."""
    tokens = x.argmax(dim=-1)
    for width, rows in groups:
        drawn = _draw(x[rows], positions[rows], numbers[rows], seeds[rows], width)
        tokens.index_copy_(0, rows, drawn)
    return tokens


def _draw(x: Tensor, positions: Tensor, numbers: Tensor, seeds: Tensor, width: int) -> Tensor:
    """Draw a token for each row [R, V].

    width: how many of the likeliest tokens are ranked; 0 if top_k and top_p allow all.
    """
    temperature, top_k, top_p, log_min_p = numbers[:, :4, None].unbind(1)
    ranked, tokens = top(x, width) if width else (x, torch.arange(x.shape[1], device=x.device)[None])
    best = x.amax(dim=-1, keepdim=True).double()
    scaled = (ranked.double() - best) / temperature
    allowed = scaled >= log_min_p
    if width:
        shares = scaled.exp() / ((x.double() - best) / temperature).exp().sum(dim=-1, keepdim=True)
        allowed &= (torch.arange(width, device=x.device) < top_k) & (shares.cumsum(dim=-1) - shares < top_p)
    noisy = (scaled + gumbel(seeds, positions, tokens)).masked_fill(~allowed, -torch.inf)
    return tokens.expand_as(noisy).gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0]
