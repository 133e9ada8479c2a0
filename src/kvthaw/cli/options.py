"""Options that several commands take, in groups or alone, and what their values ask for."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import typer

from kvthaw.cli.common import prompt_text
from kvthaw.cli.progress import waiting
from kvthaw.config import CacheConfig
from kvthaw.engine.hub import check_path, offline
from kvthaw.errors import ConfigError, one_of
from kvthaw.formatting import read_bytes
from kvthaw.method_names import AUTO, BASELINES, GROUP, OWN, split_names, unknown_method
from kvthaw.regions import BUDGET

if TYPE_CHECKING:
    from kvthaw.cache.index_api import Method
    from kvthaw.engine.chat_template import Chat
    from kvthaw.engine.hf import PreTrainedModel
    from kvthaw.engine.sampling import Sampling
    from kvthaw.evaluate.variant import Variant

T = TypeVar("T")
MOST = (1 << 31) - 1
"""The largest number of tokens: positions are 32-bit integers."""


def tokens_of(text: str | int) -> int:
    """Read a number of tokens, such as 4096, or 128k for 128 times 1,024. Raises a usage error for anything else."""
    found = re.fullmatch(r"(-?\d+)(k?)", str(text).strip().lower())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a number of tokens, such as 4096 or 128k")
    number = int(found[1]) * (1024 if found[2] else 1)
    if not 1 <= number <= MOST:
        raise typer.BadParameter(f"{text} is too {'small' if number < 1 else 'large'}; it must be from 1 to {MOST:,}")
    return number


def named_model(name: str | None) -> str | None:
    """Return a model's name, unless torch need not be imported to see that it cannot be loaded."""
    if name is not None:
        check_path(name)
        offline(name)
    return name


def named_method(given: Any) -> Any:
    """Return names of methods with their options. Raises ConfigError for one that there is not, before torch is imported."""
    loaded, packaged = sys.modules.get("kvthaw.methods"), (point.name for point in entry_points(group=GROUP))
    known = dict.fromkeys((AUTO, *(OWN if loaded is None else loaded.METHODS), *packaged))
    for text in [given] if isinstance(given, str) else given or ():
        for name in (part.partition(":")[0] for part in names_of([text])):
            if name not in known:
                error = unknown_method(name, known)
                raise error if name in BASELINES else ConfigError(f"{error}; --plugin FILE.PY adds the methods of a file")
    return given


def named_dtype(name: str) -> str:
    """Return a dtype's name as torch has it."""
    found = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(name, name)
    one_of(("auto", "float32", "bfloat16", "float16"), dtype=found)
    return found


def named_device(name: str | None) -> str | None:
    """Return a device's name. Raises ConfigError for a kind of device that there is not, before torch is imported, and for a
    missing GPU before transformers is."""
    if name is not None and not re.fullmatch(r"(cpu|cuda|mps|xpu|hpu|npu|meta)(:\d+)?", name):
        raise ConfigError(f"device is {name!r}; it must be cpu, cuda, or one of several as cuda:1")
    if name is not None and name.startswith("cuda"):
        import torch  # the fastest that knows it

        if not torch.cuda.is_available():
            raise ConfigError(f"device is {name!r}, but torch finds no GPU here; leave --device out, or say cpu")
    return name


def named_memory(text: str | None) -> str | None:
    """Return a --device-memory. Raises ConfigError for none at all, which would leave the cache no room."""
    if text not in (None, "auto") and read_bytes(text, "device_memory") < 1:
        raise ConfigError(f'device_memory is {text!r}; it must be at least 1 byte, such as "8GiB", or "auto"')
    return text


MODEL = typer.Option(
    "--model",
    metavar="NAME",
    help="[bold]shipped[/], a local folder, a .gguf file, or an id on the Hugging Face hub.",
    callback=named_model,
)
Model = Annotated[str, MODEL]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more of the cache after each answer.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; the GPU if there is one.", callback=named_device)
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="float32, bfloat16, float16; auto: bfloat16 on a GPU, float32 on a CPU.", callback=named_dtype
    ),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        help='Device memory that the cache may fill, such as "8GiB"; or "auto". Default: auto with --method auto, else none.',
        callback=named_memory,
    ),
]


def folder(name: str | Path) -> Path:
    """Read the name of a folder, which need not exist. Raises a usage error for an empty name, by which Path means the current
    folder, and for a file."""
    if not str(name):
        raise typer.BadParameter("it is empty; name a folder, or . for the current one")
    if Path(name).is_file():
        raise typer.BadParameter(f"{str(name)!r} is a file; name a folder")
    return Path(name)


Seed = Annotated[int, typer.Option("--seed", min=0, max=(1 << 63) - 1, help="Seed of all random choices.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Lines = Annotated[bool, typer.Option("--json", help="Print one JSON object a result and nothing else on stdout.")]

Methods = Annotated[
    list[str],
    typer.Option(
        "--method",
        help="Methods, separated by commas or repeated. Options follow a colon, as in icecache-digest:reuse=2; every method also "
        "takes budget, retrieved, dense_layers, sink, window, buffer and kv_dtype: pariskv:budget=0.2,prkv:sink=4.",
        callback=named_method,
    ),
]


def _load_plugins(paths: list[Path] | None) -> list[Path] | None:
    if paths:
        from kvthaw.methods import METHODS

        for path in paths:
            METHODS.load_plugin(path)
    return paths


Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.PY",
        help="Add the methods in METHODS of this Python file; may be repeated.",
        callback=_load_plugins,
        is_eager=True,
        exists=True,
        dir_okay=False,
    ),
]
DIGEST, LENGTH = ["icecache-digest"], ["4096"]
SEVERAL = "several by commas or repeated"


def budgets(default: str) -> Any:
    """Return the option --budget of a command that takes several.

    default: the budget without --budget and without --retrieved.
    """
    return typer.Option(
        "--budget",
        metavar="TOKENS",
        help=f"Most tokens attended per KV head and step, or fractions of the length; {SEVERAL}. Default {default}.",
    )


OneBudget = Annotated[
    str,
    typer.Option("--budget", metavar="TOKENS", help="Most tokens attended per KV head and step, or a fraction of the length."),
]
Budgets = Annotated[list[str] | None, budgets(str(BUDGET))]
Retrieved = Annotated[
    int | None,
    typer.Option(
        "--retrieved",
        max=MOST,
        metavar="TOKENS",
        help="Instead of --budget: tokens retrieved in addition to the paper's own sink and window.",
    ),
]
ManyRetrieved = Annotated[
    list[str] | None,
    typer.Option(
        "--retrieved",
        metavar="TOKENS",
        help=f"Instead of --budget, or in addition: tokens retrieved beside the paper's own sink and window; {SEVERAL}.",
    ),
]
DenseLayers = Annotated[
    str,
    typer.Option(
        "--dense-layers",
        metavar="N",
        help="How many first layers keep all KV. auto: the method's own number (mostly 2) in models of 16 layers and more, else 0.",
    ),
]
ManyDenseLayers = Annotated[
    list[str] | None,
    typer.Option(
        "--dense-layers",
        metavar="N",
        help=f"How many first layers keep all KV; {SEVERAL}. Default: the method's own number (mostly 2) in models of 16 "
        "layers and more, else 0.",
    ),
]


def _rope_scaling(text: str | None) -> str | None:
    from kvthaw.engine.rope_scaling import RopeScaling

    return None if text is None else str(RopeScaling.read(text))


RopeScaled = Annotated[
    str | None,
    typer.Option(
        "--rope-scaling",
        metavar="yarn:N",
        help="Give the model N times its positions, by YaRN, for a text that is longer. Most models then answer worse.",
        callback=_rope_scaling,
    ),
]
Cut = Annotated[
    bool, typer.Option("--cut", help="Leave out the middle of a text that is longer than the model's positions, and say so.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after this number of tokens.")]
ChatTemplate = Annotated[
    Path | None,
    typer.Option("--chat-template", help="A chat template (Jinja) instead of the tokenizer's.", exists=True, dir_okay=False),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0.0,
        help="0 takes the likeliest token. Default of this and the next four: the model's generation config, else 0.",
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        parser=tokens_of,
        metavar="TOKENS",
        help="Tokens that go through the model at once. Default 16k, or less on a small GPU.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option("--host-memory", help='Host memory for KV, such as "64GiB". Default: as much as the system has.'),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Append each result to this file as a line of JSON; results already in it are not computed again."
    ),
]


def budget_of(text: str) -> int | float:
    """Read a budget: tokens, or with a point a fraction of the length. Raises ValueError, and a usage error for one that is not
    positive."""
    found = float(text) if "." in text else int(text)
    if found <= 0:
        raise typer.BadParameter(f"{text} is too small; it must be at least 1 token, or a fraction above 0 as 0.1")
    return found


def listed(given: Sequence[str], kind: Callable[[str], T], option: str) -> list[T]:
    """Return the values of an option, separated by commas or given one by one, without repeats. Raises a usage error that names the
    value."""
    found: dict[T, None] = {}
    for text in given:
        for part in filter(None, map(str.strip, text.split(","))):
            try:
                value = kind(part)
            except ValueError:
                where = "" if part == text else f" in {text!r}"
                raise typer.BadParameter(f"{part!r}{where} is not a number", param_hint=option) from None
            except typer.BadParameter as error:
                raise typer.BadParameter(error.message, param_hint=option) from None
            if isinstance(value, int) and value > MOST:
                raise typer.BadParameter(f"{value} is too large; it must be at most {MOST:,}", param_hint=option)
            found[value] = None
    if not found:
        raise typer.BadParameter("it is empty", param_hint=option)
    return list(found)


def one_budget(text: str | None) -> int | float | None:
    """Return a budget option that takes one value."""
    return None if text is None else single([text], budget_of, "--budget")


def dense_of(text: str) -> int | None:
    """Return a --dense-layers that takes one value; None leaves the number to the method."""
    return None if text == "auto" else single([text], int, "--dense-layers")


def single(given: Sequence[str], kind: Callable[[str], T], option: str) -> T:
    """Return the value of an option that takes one. Raises a usage error for several."""
    found = listed(given, kind, option)
    if len(found) > 1:
        raise typer.BadParameter(f"{','.join(given)!r} has several values; this command takes one", param_hint=option)
    return found[0]


def host_bytes_of(text: str | None) -> int | None:
    """Return a --host-memory in bytes."""
    return None if text is None else read_bytes(text, "--host-memory")


def words(text: Path | None) -> str | None:
    """Return the text of a file, if one is given."""
    return None if text is None else prompt_text(None, text)


def names_of(methods: Sequence[str]) -> list[str]:
    """Return the methods of an option that is given several times, or with several separated by commas."""
    return [name for one in methods for name in split_names(one)]


def many_dense(given: Sequence[str] | None) -> list[int]:
    """Return the values of --dense-layers; empty if the methods choose."""
    return [] if not given or list(given) == ["auto"] else listed(given, int, "--dense-layers")


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its dataclass parameters as options. The help shows each dataclass in a panel."""
    signature, each = inspect.signature(command, eval_str=True), list[inspect.Parameter]()
    groups: dict[str, Any] = {}
    for one in signature.parameters.values():
        if is_dataclass(one.annotation):
            group: Any = one.annotation
            groups[one.name] = group
            hints = get_type_hints(group, include_extras=True)
            each += [_parameter(field.name, hints[field.name], field, group.panel) for field in fields(group)]
        else:
            each.append(_parameter(one.name, one.annotation, one.default))

    @functools.wraps(command)
    def taken(**given: Any) -> None:
        made = {name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()}
        command(**given, **made)

    vars(taken)["__signature__"] = signature.replace(parameters=each)
    taken.__annotations__ = {one.name: one.annotation for one in each}
    return taken


def option(text: str, default: Any = None, *names: str, **more: Any) -> Any:
    """Return a field of a group, or the default of a command's parameter, by its help and typer's other settings of an option.

    default: `...` makes the option required.
    """
    make = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**make, metadata={"option": typer.Option(*names, help=text, **more)})


def file_option(text: str, default: Any = None, *names: str, **more: Any) -> Any:
    """Return an option whose value is a file that exists."""
    return option(text, default, *names, exists=True, dir_okay=False, **more)


def _parameter(name: str, kind: Any, default: Any, panel: str | None = None) -> inspect.Parameter:
    """Return a parameter as typer takes it.

    default: its value, or a field with it.
    """
    kind, *declared = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if isinstance(default, Field):
        declared = [default.metadata["option"]] if default.metadata else declared
        default = default.default if default.default_factory is MISSING else default.default_factory()
    found = copy(declared[0])
    found.rich_help_panel = panel
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, found])


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model to load, and where."""

    panel: ClassVar = "Model"
    model: Model = "shipped"
    device: Device = None
    dtype: Dtype = "auto"
    rope_scaling: RopeScaled = None

    def load(
        self,
        caches: Iterable[tuple[str | Method, CacheConfig]] = (),
        chat: Chat | None = None,
        text: str | None = None,
        template: str | None = None,
    ) -> tuple[PreTrainedModel, Any]:
        """Load the model under a spinner on stderr.

        caches: methods and settings that the model is loaded for.
        text: a text that the model's positions must have room for.
        template: a chat template instead of the tokenizer's.

        Raises ConfigError, before weights are read, for settings that no cache of the model takes and for a `text` that is too
        long. A tokenizer whose template does not support `chat` raises it too.
        """

        def prepare(tokenizer: Any, config: Any) -> None:
            for method, settings in caches:
                check_settings(config, method, settings)
            if template is not None:
                tokenizer.chat_template = template
            if chat is not None:
                chat.check(tokenizer)
            if text is not None:
                check_text(tokenizer, text, positions(config))

        with waiting(f"loading {self.model}"):
            from kvthaw.engine.hf.cache import check_settings
            from kvthaw.engine.hf.model import check_text, load, positions, silence

            silence()
            given: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "rope_scaling": self.rope_scaling}
            return load(self.model, prepare=prepare, **given)


@dataclass(frozen=True, slots=True)
class SystemOptions:
    """The chat template, and how a chat begins."""

    panel: ClassVar = "Chat template"
    chat_template: ChatTemplate = None
    system: str | None = option("A system prompt, for the chat template.")
    thinking: bool | None = option("Switch thinking on or off in the chat template, if it has such a switch.")

    def template(self) -> str | None:
        """Return the template that is given instead of the tokenizer's."""
        return words(self.chat_template)

    def asked(self, chat: bool | None = None) -> Chat | None:
        """Return how to ask through the chat template, which --system and --thinking imply; None: not. Raises a usage error for
        these two without it."""
        from kvthaw.engine.chat_template import Chat

        wanted = self.system is not None or self.thinking is not None
        if chat is False and wanted:
            raise typer.BadParameter("a system prompt and thinking need the chat template", param_hint="--no-chat")
        return Chat(self.system, self.thinking) if chat or wanted else None


@dataclass(frozen=True, slots=True)
class ChatOptions(SystemOptions):
    """Whether a question is asked through the chat template, and how."""

    chat: bool | None = option("Ask through the tokenizer's chat template; --system implies it.")

    def asked(self, chat: bool | None = None) -> Chat | None:
        """See SystemOptions; --chat counts unless `chat` is given."""
        return SystemOptions.asked(self, self.chat if chat is None else chat)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The method and the settings of a cache."""

    panel: ClassVar = "Cache"
    method: str = option(
        "A name of [bold]kvthaw methods[/], with options as in icecache-digest:reuse=2; or [bold]auto[/].",
        "auto",
        callback=named_method,
    )
    plugin: Plugin = None
    budget: str | None = option(
        f"Most tokens attended per KV head and step, or a fraction of the length. Default {BUDGET:,}.", metavar="TOKENS"
    )
    retrieved: Retrieved = None
    dense_layers: DenseLayers = "auto"
    device_memory: DeviceMemory = None
    host_memory: HostMemory = None
    kv_dtype: str | None = option("[bold]fp8[/]: store rows in 8 bits a number, with a scale each. Default: the model's.")

    def config(self, seed: int = 0) -> CacheConfig:
        """Return the settings, checked before a model is loaded."""
        budget, dense_layers = one_budget(self.budget), dense_of(self.dense_layers)
        read = {"budget": budget, "dense_layers": dense_layers, "host_bytes": host_bytes_of(self.host_memory)}
        return CacheConfig.split(asdict(self) | read | {"seed": seed})[0]


@dataclass(frozen=True, slots=True)
class VariantOptions:
    """Several methods under several limits."""

    panel: ClassVar = "Methods"
    method: Methods = field(default_factory=DIGEST.copy)
    plugin: Plugin = None
    budget: Budgets = None
    retrieved: ManyRetrieved = None
    dense_layers: ManyDenseLayers = None

    def variants(self) -> list[Variant]:
        """Return every method under every limit, or under BUDGET tokens without limits; see read_variants. A wrong name or option
        fails before a model is loaded."""
        from kvthaw.evaluate.variant import read_variants

        return read_variants(
            names_of(self.method),
            listed(self.budget, budget_of, "--budget") if self.budget else ([] if self.retrieved else [BUDGET]),
            listed(self.retrieved, int, "--retrieved") if self.retrieved else [],
            many_dense(self.dense_layers),
        )


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How answers are drawn."""

    panel: ClassVar = "Sampling"
    temperature: Temperature = None
    top_k: int | None = option("Draw from this number of the likeliest tokens.", min=1)
    top_p: float | None = option("Draw from the likeliest tokens that have this probability together.")
    min_p: float | None = option("Draw from tokens of at least this share of the likeliest's probability.")
    repetition_penalty: float | None = option("Above 1: tokens of the prompt and the answer become less likely.")
    frequency_penalty: float = option("Above 0: a token of the answer becomes less likely each time.", 0.0)
    presence_penalty: float = option("Above 0: a token of the answer becomes less likely once.", 0.0)
    stop: list[str] | None = option(
        "End an answer before this text, which may spell special tokens; may be repeated.", metavar="TEXT"
    )
    seed: Seed = 0

    @property
    def given(self) -> dict[str, Any]:
        """The given settings that a model's generation config may have too."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the settings, checked before a model is loaded."""
        from kvthaw.engine.sampling import Sampling

        fixed = {name: getattr(self, name) for name in ("seed", "frequency_penalty", "presence_penalty")}
        return Sampling(max_tokens=max_tokens, stop=self.stop or (), **fixed, **self.given)
