"""Options that belong together: dataclasses whose fields a command takes as options of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import typer

from kvthaw.cli import options
from kvthaw.cli.progress import waiting
from kvthaw.config import CacheConfig
from kvthaw.regions import BUDGET

if TYPE_CHECKING:
    from kvthaw.cache.index_api import Method
    from kvthaw.engine.chat_template import Chat
    from kvthaw.engine.hf import PreTrainedModel
    from kvthaw.engine.sampling import Sampling
    from kvthaw.evaluate.variant import Variant


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
    model: options.Model = "shipped"
    device: options.Device = None
    dtype: options.Dtype = "auto"
    rope_scaling: options.RopeScaled = None

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
    chat_template: options.ChatTemplate = None
    system: str | None = option("A system prompt, for the chat template.")
    thinking: bool | None = option("Switch thinking on or off in the chat template, if it has such a switch.")

    def template(self) -> str | None:
        """Return the template that is given instead of the tokenizer's."""
        return options.words(self.chat_template)

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
        callback=options.named_method,
    )
    plugin: options.Plugin = None
    budget: str | None = option(
        f"Most tokens attended per KV head and step, or a fraction of the length. Default {BUDGET:,}.", metavar="TOKENS"
    )
    retrieved: options.Retrieved = None
    dense_layers: options.DenseLayers = "auto"
    device_memory: options.DeviceMemory = None
    host_memory: options.HostMemory = None
    kv_dtype: str | None = option("[bold]fp8[/]: store rows in 8 bits a number, with a scale each. Default: the model's.")

    def config(self, seed: int = 0) -> CacheConfig:
        """Return the settings, checked before a model is loaded."""
        budget, dense_layers = options.one_budget(self.budget), options.dense_of(self.dense_layers)
        read = {"budget": budget, "dense_layers": dense_layers, "host_bytes": options.host_bytes_of(self.host_memory)}
        return CacheConfig.split(asdict(self) | read | {"seed": seed})[0]


@dataclass(frozen=True, slots=True)
class VariantOptions:
    """Several methods under several limits."""

    panel: ClassVar = "Methods"
    method: options.Methods = field(default_factory=options.DIGEST.copy)
    plugin: options.Plugin = None
    budget: options.Budgets = None
    retrieved: options.ManyRetrieved = None
    dense_layers: options.ManyDenseLayers = None

    def variants(self) -> list[Variant]:
        """Return every method under every limit; see `variants_of`."""
        return options.variants_of(self.method, self.budget, self.retrieved, self.dense_layers)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How answers are drawn."""

    panel: ClassVar = "Sampling"
    temperature: options.Temperature = None
    top_k: int | None = option("Draw from this number of the likeliest tokens.", min=1)
    top_p: float | None = option("Draw from the likeliest tokens that have this probability together.")
    min_p: float | None = option("Draw from tokens of at least this share of the likeliest's probability.")
    repetition_penalty: float | None = option("Above 1: tokens of the prompt and the answer become less likely.")
    frequency_penalty: float = option("Above 0: a token of the answer becomes less likely each time.", 0.0)
    presence_penalty: float = option("Above 0: a token of the answer becomes less likely once.", 0.0)
    stop: list[str] | None = option(
        "End an answer before this text, which may spell special tokens; may be repeated.", metavar="TEXT"
    )
    seed: options.Seed = 0

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
