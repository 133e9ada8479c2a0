"""A conversation on one cache: each turn prefills only new tokens."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvthaw.answering import Answer, Progress
from kvthaw.engine.chat_template import Chat, dates_of, dates_said, following
from kvthaw.engine.hf import Cache, PreTrainedModel, saving
from kvthaw.engine.hf.kept import fill, keep
from kvthaw.engine.hf.model import check_prompt, check_text, positions
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import GREEDY, Sampling
from kvthaw.engine.text import common, decode, encode, tokens_after
from kvthaw.errors import CacheError, ConfigError
from kvthaw.evaluate.machine import now
from kvthaw.evaluate.variant import Variant
from kvthaw.inspect.page import standalone, texts
from kvthaw.inspect.passages import RECENT, Passage, passages
from kvthaw.inspect.recorder import Recorder, Recording
from kvthaw.inspect.run import Inspection, Run


def plain_template(tokenizer: Any) -> str:
    """Return a chat template for a model without one: a user's message starts a new line, and the model continues after it."""
    start = json.dumps(tokenizer.decode(tokenizer("")["input_ids"]))
    return (
        f"{{{{ {start} }}}}{{% for message in messages %}}{{% if message['role'] != 'assistant' and not loop.first %}}"
        r"{{ '\n' }}{% endif %}{{ message['content'] }}{% endfor %}"
    )


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Conversation:
    """A conversation through a tokenizer's chat template, on an empty cache of one row.

    Each turn prefills the tokens that the cache lacks. Answers stay in the cache as generated tokens, even if their text
    would be tokenized otherwise. A turn that fails or is interrupted leaves the conversation unchanged.

    messages: the messages so far, in the form of chat templates.
    tokens: the conversation's tokens. The cache may hold only a part of them.
    prefilled: tokens of the latest prompt that were not in the cache.
    answer: the latest answer.
    recording: the rows that the latest answer recalled.
    dates: the dates that the template prints in every turn, by format. A kept conversation reuses its former dates.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        cache: Cache,
        chat: Chat | None = None,
        *,
        prefill_chunk: int | None = None,
    ) -> None:
        self.model, self.tokenizer, self.cache, self.chat = model, tokenizer, cache, chat or Chat()
        self.chat.check(tokenizer)
        self.messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self.document = ""
        self.dates = dates_of(tokenizer)
        self.prefilled = 0
        self.ttft_s = 0.0
        self.answer: Answer | None = None
        self.recording = Recording()
        self._chunk, self._logits = prefill_chunk, torch.empty(0)
        self._segments: list[tuple[str, list[int]]] = []  # text of the prompt and its tokens
        self._recorder = Recorder(cache.kv)
        self._asked = 0  # where the latest question begins

    def read(self, document: str, *, kept: Path | None = None, progress: Progress = lambda done, total: None) -> None:
        """Begin with a document, which the first question follows.

        kept: a folder with its KV, which is read, or written.
        """
        self.document = document.rstrip()
        if kept is not None and kept.exists():
            with suppress(CacheError):  # which fill() tells
                self._date(decode(self.tokenizer, saving.check_header(self.model, kept)["token_ids"][0]))
        text = self._begin(self.document)
        ids = self._tokens(text)
        check_prompt(self.model, len(ids) + 1)
        done = 0 if kept is None else fill(self.cache, kept, ids)
        prefill(self.model, self.cache, ids[done:], chunk=self._chunk, progress=progress)
        self.cache.wait()
        if kept is not None and done < len(ids) - 1:
            keep(self.cache, kept, ids, about={"document": document})
        self.tokens, self._segments, self.prefilled = ids, [(text, ids)], len(ids) - done

    def save(self, path: Path) -> None:
        """Save the conversation and its KV in a folder. resume() continues it, and a server loads it as a context."""
        held, about = self.tokens[: self.cache.get_seq_length()], list[dict[str, Any]](self.messages)
        alone = {"document": self.document} if self.document else None
        if about and self.document:  # two parts tell where the document ends
            parts = self.document, self.messages[0]["content"][len(self.document) :]
            about[0] = about[0] | {"content": [{"type": "text", "text": part} for part in parts]}
        saving.save(self.model, self.cache.kv, self.cache.layers, path, torch.tensor(held), about=about or alone)

    def resume(self, path: Path) -> None:
        """Load a saved conversation or document. Raises CacheError if there is none, and ConfigError for a text saved without
        this chat template."""
        header = saving.check_header(self.model, path)
        ids = header["token_ids"][0]
        text = decode(self.tokenizer, ids)
        self._date(text)
        said, head = header.get("about"), self._begin("")
        if not text.startswith(head):
            raise ConfigError(f"{path} was kept without this chat template and system prompt; give its text as --file")
        saving.load(self.model, self.cache.kv, self.cache.layers, path)
        about = said if isinstance(said, list) else []  # otherwise of a document
        first = about[0]["content"] if about else text[len(head) :]
        self.document = first[0]["text"] if isinstance(first, list) else "" if about else first
        self.messages = [one | {"content": _joined(one["content"])} for one in about]
        self.tokens, self._segments = ids, [(text, ids)]

    def ask(self, question: str, *, progress: Progress = lambda done, total: None) -> None:
        """Prefill a question, and all earlier tokens that the cache lacks.

        progress: see `prefill`.
        """
        start, before = now(self.model.device), len(self._held)
        opened = not self.messages and self.document
        content = self.document + following(self.document, question) if opened else question
        messages = [*self.messages, {"role": "user", "content": content}]
        segments = self._encode(self.chat.turns(self.tokenizer, messages, dates=self.dates))
        ids = [token for _, part in segments for token in part]
        check_prompt(self.model, len(ids))
        kept = self._keep(0 if self.cache.foreign else min(common(self._held, ids), len(ids) - 1))
        try:
            self._logits = prefill(self.model, self.cache, ids[kept:], chunk=self._chunk, progress=progress)
        except BaseException:
            self._keep(min(before, kept))
            raise
        self.cache.wait()
        self.messages, self._segments, self.tokens, self.prefilled = messages, segments, ids, len(ids) - kept
        self._asked, self.ttft_s = kept, now(self.model.device) - start

    def stream(self, sampling: Sampling = GREEDY) -> Generator[str, None, None]:
        """Yield the answer in pieces. If the iteration ends early, the pieces so far belong to the conversation."""
        answer = self.answer = Answer(
            self.model, self.tokenizer, self.cache, self._logits, sampling=sampling, prompt=self.tokens
        )
        recording = self.recording = Recording()
        pieces = answer.__iter__()
        try:
            for piece in pieces:
                recording.follow(len(answer.tokens), self._recorder)
                yield piece
        finally:
            pieces.close()
            self.messages = [*self.messages, {"role": "assistant", "content": answer.text}]
            if not answer.stopped:
                self._segments.append((answer.text, answer.tokens))
            self.tokens = self.tokens + answer.tokens

    def clear(self) -> None:
        """Forget all but the document."""
        text = self._begin(self.document) if self.document else ""
        ids = self._tokens(text) if text else []
        self._keep(common(self._held, ids))
        self.messages, self.tokens, self.answer = [], ids, None
        self._segments = [(text, ids)] if text else []

    def recalled(self, most: int = 5) -> list[Passage]:
        """Return the passages that the latest answer came from; none if it attended to everything."""
        if self.answer is None or not any(self.recording.selected):
            return []
        answer = self.answer.tokens
        before = self._asked or max(0, len(self.tokens) - len(answer) - RECENT)
        said = texts(self.tokenizer, answer, self.tokens[: len(self.tokens) - len(answer)])
        return passages(self.recording, texts(self.tokenizer, self.tokens[:before]), said, most)

    def page(self, title: str) -> str:
        """Return an HTML page of the rows that each token of the latest answer recalled. Raises ConfigError if there are none."""
        if self.answer is None or not any(self.recording.selected):
            raise ConfigError("nothing was recalled that could be shown")
        prompt, stats = self.tokens[: len(self.tokens) - len(self.answer.tokens)], self.cache.stats()
        run = Run(Variant(stats.method, stats.budget), self.recording)
        return standalone(
            Inspection(prompt[: self._asked], prompt[self._asked :], self.answer.tokens, [run]), self.tokenizer, title
        )

    @property
    def _held(self) -> list[int]:
        return self.tokens[: self.cache.get_seq_length()]

    def _begin(self, content: str) -> str:
        """Return the common beginning of the prompts whose first message begins with `content`."""
        one, other = (self._render(content + end) for end in ("a", "b"))
        return one[: common(one, other)]

    def _render(self, content: str) -> str:
        return self.chat.render(self.tokenizer, content, self.dates)

    def _date(self, text: str) -> None:
        """Reuse the dates in a kept text, if it began with this template."""
        if self.dates and not text.startswith(self._begin("")):
            self.dates = dates_said(text, partial(self.chat.render, self.tokenizer), self.dates) or self.dates

    def _tokens(self, text: str) -> list[int]:
        check_text(self.tokenizer, text, positions(self.model))
        return encode(self.tokenizer, text)

    def _encode(self, text: str) -> list[tuple[str, list[int]]]:
        """Split a prompt into parts with their tokens. Parts that it shares with the last prompt and answer keep their tokens."""
        found, at = list[tuple[str, list[int]]](), 0
        for part, ids in self._segments:
            as_it_is = next((one for one in (part, part.strip()) if text.startswith(one, at)), None)
            if as_it_is is None:
                break
            found.append((as_it_is, ids))
            at += len(as_it_is)
        rest = text[at:]
        return [*found, (rest, tokens_after(self.tokenizer, rest) if found else self._tokens(rest))]

    def _keep(self, length: int) -> int:
        """Crop the cache to its first `length` tokens, or to none if it cannot be cropped. Returns how many are left."""
        try:
            if length:
                self.cache.keep(length)
                return length
        except CacheError:
            pass
        self.cache.reset()
        self._recorder.detach()
        self._recorder = Recorder(self.cache.kv)  # without what was selected before
        return 0
