"""kvthaw chat: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvthaw.cli import options
from kvthaw.cli.common import (
    as_its_makers,
    attended,
    complain,
    cut_to,
    details,
    explained,
    prompt_text,
    took,
    warned,
    write_whole,
)
from kvthaw.cli.options import DIGEST, CacheOptions, ModelOptions, SamplingOptions, SystemOptions, file_option, flat, option
from kvthaw.cli.progress import Reading, say, waiting
from kvthaw.errors import ConfigError, hint
from kvthaw.formatting import counted, human
from kvthaw.names import check_kept_name

if TYPE_CHECKING:
    from kvthaw.conversation import Conversation
    from kvthaw.engine.sampling import Sampling

EXAMPLES = (
    "Examples:\n\n  kvthaw chat --model Qwen/Qwen3-8B --no-thinking\n\n"
    "  kvthaw chat --model Qwen/Qwen3-8B --file book.txt --context book   (its KV is kept as kv/book)\n\n"
    "  kvthaw chat --model Qwen/Qwen3-8B --context book   (continues with it, without prefill)\n\n"
    '  echo "Who stole the tarts?" | kvthaw chat --model Qwen/Qwen3-8B --file book.txt --method icecache-digest --budget 256'
)
SHIPPED = (
    " It is a small model, trained to find planted facts and to continue books, not to answer questions or to converse: it soon "
    "repeats itself, less with --repetition-penalty 1.2. --model NAME takes another."
)
LOOPS = " Stopped, because it repeats itself: /set repetition-penalty 1.2 helps, and so does a larger budget."
_LOOP, _LINE = 128, 64
"""Tokens of a loop that end an answer, and the most that repeat in it. It repeats at least six times."""
SETTINGS: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top-k": ("top_k", int),
    "top-p": ("top_p", float),
    "min-p": ("min_p", float),
    "repetition-penalty": ("repetition_penalty", float),
    "max-new-tokens": ("max_tokens", int),
    "seed": ("seed", int),
}
"""The settings of /set, by the names of options: fields of Sampling, and their descriptions."""
_AT_START = frozenset({"model", "method", "budget", "retrieved", "dense-layers", "kv-dtype", "system"})
"""Options that a conversation cannot change."""
HELP = {
    "/recalled [N]": "the N passages that the last answer came from, 5 if not given",
    "/recalled PAGE.html": "a page that shows what it recalled, token by token",
    "/stats": "what the cache holds and did",
    "/save NAME": "keep the conversation and its KV; kvthaw chat --context NAME continues it",
    "/set [NAME VALUE]": "how answers are chosen, such as /set temperature 0.7; without a name, what is set",
    "/clear": "forget all but the document",
    "/quit": "end, as Ctrl-D does; Ctrl-C ends an answer only",
}


@flat
def chat(
    loading: ModelOptions,
    settings: CacheOptions,
    template: SystemOptions,
    drawing: SamplingOptions,
    file: Path | None = file_option("Talk about this text."),
    context: str | None = option(
        "Continue the document or conversation that --kv-dir has under this name; with --file, keep the text under it.",
        metavar="NAME",
    ),
    kv_dir: Path = option(
        "Where --context and /save keep documents and conversations.", Path("kv"), parser=options.folder, metavar="DIRECTORY"
    ),
    cut: options.Cut = False,
    max_new_tokens: options.MaxNewTokens = 1024,
    prefill_chunk: options.PrefillChunk = None,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model, about a text if you like; every turn prefills only what is new.

    Messages go through the tokenizer's chat template; a model without one continues what you write, line by line. /help lists the
    commands. Answers go to stdout, all else to stderr; without a terminal, every line of stdin is a turn.
    """
    if "," in settings.method:
        raise ConfigError(
            f"--method is {settings.method!r}; a conversation has one. kvthaw generate --question takes several, and shows their "
            "answers one below the other"
        )
    config, model = settings.config(drawing.seed), loading.model
    document = None if file is None else prompt_text(None, file)
    place = None if context is None else _place(kv_dir, context, "--context")
    if place is not None and document is None and not place.exists():
        raise ConfigError(f"nothing is kept in {place}; give a text for it as --file")
    from kvthaw.methods.auto import check_settings

    check_settings(settings.method, config)  # what is wrong costs no loading
    sampling, asked = drawing.sampling(max_new_tokens), template.asked()
    from kvthaw.conversation import Conversation, plain_template
    from kvthaw.engine.hf import Cache
    from kvthaw.engine.hf.model import positions

    llm, tokenizer = loading.load([(settings.method, config)], asked, None if cut else document, template.template())
    sampling = as_its_makers(sampling, drawing.given, llm)
    if not tokenizer.chat_template:
        tokenizer.chat_template = plain_template(tokenizer)
        warned(
            f"{model} has no chat template: it continues your line. --chat-template FILE gives it one."
            + SHIPPED * (model == "shipped")
        )
    talk = Conversation(llm, tokenizer, Cache(llm, settings.method, config=config), asked, prefill_chunk=prefill_chunk)
    if document is not None:
        limit = positions(llm)
        if cut and limit is not None:
            document = cut_to(tokenizer, document, max(limit // 2, limit - limit // 8 - max_new_tokens))
        with ExitStack() as shown:
            talk.read(document, kept=place, progress=Reading(shown))
        kept = len(talk.tokens) - talk.prefilled
        say(f"{file}: {counted(len(talk.tokens), 'token')}" + (f", {kept:,} of them kept before" if kept else ""))
    elif place is not None:
        with waiting(f"reading {place}"):
            talk.resume(place)
        say(f"{place}: {counted(len(talk.tokens), 'token')}, {counted(len(talk.messages), 'message')}")
    say("/help lists commands; Ctrl-C ends an answer, Ctrl-D the conversation")
    for line in _lines():
        if line in ("/quit", "/exit", "/bye"):
            break
        try:
            if line.split()[0] == "/set":
                sampling = _set(sampling, line.removeprefix("/set"))
            elif line.startswith("/"):
                _obey(talk, *line.split(maxsplit=1), kv_dir=kv_dir)
            else:
                _answer(talk, line, sampling, verbose)
        except Exception as error:
            if (said := explained(error)) is None:
                raise
            complain(said)


def _answer(talk: Conversation, question: str, sampling: Sampling, verbose: bool) -> None:
    """Print an answer as it comes, until Ctrl-C."""
    with _interruptible() as interrupted, ExitStack() as shown:
        reading = Reading(shown)

        def read(done: int, total: int) -> None:
            if interrupted():
                raise KeyboardInterrupt
            reading(done, total)

        try:
            talk.ask(question, progress=read)
        except KeyboardInterrupt:
            reading.end()
            say("stopped; the question is forgotten")
            return
        reading.end()
        pieces, loops = talk.stream(sampling), False
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            loops = talk.answer is not None and repeats(talk.answer.tokens)
            if interrupted() or loops:
                break
        pieces.close()
        print(flush=True)
    answer = talk.answer
    if answer is not None:
        why = {"length": " Cut at --max-new-tokens.", "interrupted": LOOPS if loops else " Stopped."}.get(answer.finish, "")
        kept = len(talk.tokens) - len(answer.tokens) - talk.prefilled
        say(took(talk.prefilled, kept, talk.ttft_s, answer.tpot_s, len(answer.tokens)) + why)
        lines = [attended(talk.cache)] if verbose or len(talk.messages) <= 2 else []
        for line in [*lines, *(details(talk.cache) if verbose else ())]:
            say(line)


def repeats(tokens: Sequence[int]) -> bool:
    """Return whether the last tokens are a line that repeats: at least six times, and over at least 128 tokens."""
    for line in range(1, min(_LINE, len(tokens) // 6) + 1):
        end = tokens[-max(_LOOP, 6 * line) :]
        if len(end) >= _LOOP and all(one == other for one, other in zip(end, end[line:], strict=False)):
            return True
    return False


def _obey(talk: Conversation, command: str, argument: str = "", *, kv_dir: Path) -> None:
    """Run the command of a line that begins with a slash."""
    if command == "/recalled":
        if argument and not argument.isdecimal() and not argument.endswith(".html"):
            raise ConfigError(f"/recalled: {argument!r} is neither a number nor the name of a page, PAGE.html")
        _recalled(talk, argument)
    elif command == "/stats":
        for line in (attended(talk.cache), *details(talk.cache)):
            say(line)
    elif command == "/save":
        if not argument:
            raise ConfigError("/save: NAME is missing")
        place = _place(kv_dir, argument, "/save: NAME")
        with waiting(f"saving {place}"):
            talk.save(place)
        say(f"kept in {place}; --context {argument} continues it")
    elif command == "/clear":
        talk.clear()
        say(f"forgotten, except the document's {counted(len(talk.tokens), 'token')}" if talk.tokens else "forgotten")
    elif command == "/help":
        for name, what in HELP.items():
            say(f"{name:20} {what}")
    else:
        names = list(dict.fromkeys(["/help", *(name.split()[0] for name in HELP)]))
        raise ConfigError(f"no command is named {command!r}; {hint(command, names, 'there are')}: {', '.join(names)}")


def _set(sampling: Sampling, argument: str) -> Sampling:
    """Return the sampling settings with the one that a line changes, and print them."""
    name, _, value = argument.strip().replace("=", " ").partition(" ")
    name, value = name.lstrip("-").replace("_", "-"), value.strip()
    if name:
        if name not in SETTINGS:
            if name in _AT_START:
                raise ConfigError(
                    f"/set: {name!r} stays as it is in a conversation; start kvthaw chat with --{name} {value}".rstrip()
                )
            raise ConfigError(f"/set: no setting is named {name!r}; {hint(name, SETTINGS, 'there are')}: {', '.join(SETTINGS)}")
        field, kind = SETTINGS[name]
        try:
            number = None if name == "top-k" and value in ("0", "none") else kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"/set {name}: {value!r} is not {what}") from None
        try:
            sampling = replace(sampling, **{field: number})  # type: ignore[arg-type]  # its own fields
        except ConfigError as error:
            raise ConfigError(f"/set {str(error).replace(field, name)}") from None
    values = {each: getattr(sampling, field) for each, (field, _) in SETTINGS.items()}
    say(", ".join(f"{each} {_shown(value)}" for each, value in values.items()))
    return sampling


def _shown(value: float | None) -> str:
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _recalled(talk: Conversation, argument: str) -> None:
    """Print the passages that the last answer recalled, at most as many as the argument says, or write their page."""
    if talk.answer is None:
        raise ConfigError("nothing was recalled: no question was answered yet")
    if not any(talk.recording.selected):
        index = talk.cache.settings.method.name
        other = DIGEST[0] if index == "full" else index
        instead = f"; start with --method {other}" if talk.cache.stats().method == "full" else ""
        raise ConfigError(f"nothing was recalled: {talk.cache.stats().no_choice or 'no step asked the index'}{instead}")
    if argument.endswith(".html"):
        page = talk.page("What the last answer recalled")
        write_whole(Path(argument), page)
        say(f"wrote {argument}, {human(len(page.encode()))}")
        return
    found = talk.recalled(int(argument or 5))
    say("the share of the KV heads that recalled it as the answer said its words")
    for one in found:
        print(f"{100 * one.share:3.0f} %  tokens {one.start:,} to {one.stop:,}  {' '.join(one.text.split())}")


def _place(folder: Path, name: str, field: str) -> Path:
    """Return the path of a saved conversation. Raises ConfigError for a new name that a server would refuse."""
    known = name and Path(name).name == name and not name.startswith(".") and (folder / name).exists()
    if not known:
        check_kept_name(name, field)
    return folder / name


def _lines() -> Iterator[str]:
    """Yield typed lines until the end of the input."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines with it
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line:
            yield line


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C inside the context; let the second one interrupt. Yields a function that returns whether there
    was one."""
    noted = list[bool]()

    def note(*_: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
