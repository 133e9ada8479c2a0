"""The requests that the server takes: OpenAI's fields, and some of vLLM's. Any other field is an error."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from kvthaw.engine.grammar import Grammar
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.tool_calls import ANY_OBJECT, SPECIAL, CallRules
from kvthaw.errors import ConfigError
from kvthaw.method_names import unknown_method
from kvthaw.methods import METHODS
from kvthaw.serve.errors import ApiError
from kvthaw.serve.fields import (
    MOST_PARTS,
    MOST_STOP_LENGTH,
    MOST_STOPS,
    MOST_TOKEN_RULES,
    MOST_TOKENS,
    Body,
    Count,
    Name,
    Only,
    Prompt,
    Several,
    Short,
    Text,
    TextOrList,
    Token,
    either,
    few,
    shape,
)

MOST_LOGPROBS = 20
"""Most alternatives that are reported for each token."""

_StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_LENGTH)]
_Stop = TextOrList[_StopString, Annotated[list[_StopString], Field(max_length=MOST_STOPS, fail_fast=True)]]
MOST_TOOLS = 128
MOST_ARGUMENTS = 1 << 18
"""Characters of the arguments of a call."""
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_Bias = dict[Annotated[Token, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]]


class StreamOptions(Body):
    """include_usage: a last chunk with the usage; continuous_usage_stats (vLLM's): it is in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, Only(False)] = False


class JsonSchema(Body):
    """The format of JSON output. name and description have no effect.

    strict: objects have only the named members.
    """

    name: str = Field(max_length=64)
    description: Annotated[str, Field(max_length=1 << 14)] | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class TextFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]

    @property
    def json_schema(self) -> JsonSchema | None:
        """See Sampled.json_format."""
        return JsonSchema(name="object", schema=ANY_OBJECT) if self.type == "json_object" else None


class SchemaFormat(Body):
    """JSON by a schema, as completions name it."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class FlatSchemaFormat(JsonSchema):
    """JSON by a schema, as responses name it."""

    type: Literal["json_schema"]

    @property
    def json_schema(self) -> JsonSchema:
        """See Sampled.json_format."""
        return self


def _choice(value: Any) -> str | None:
    return "object" if isinstance(value, dict) else shape(value)


class Sampled(Body):
    """What every kind of request for text takes."""

    format_field: ClassVar[str] = "response_format"
    model: Short | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False
    # for OpenAI's accounts and caches alone
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_retention: Short | None = None
    # vLLM's
    top_k: int = Field(0, ge=-1, lt=1 << 31, description="0 and -1: all")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_TOKEN_RULES, fail_fast=True)] = Field([])
    include_stop_str_in_output: bool = False
    cache_salt: str = Field("", max_length=256, description="prompts of other salts share no KV with this one")
    # OpenAI's that are not served
    store: Annotated[bool, Only(False)] = False
    parallel_tool_calls: bool = True
    service_tier: Annotated[str, Only("auto", "default")] = "auto"
    # kvthaw's
    context: Name | None = Field(None, description="a kept document, which the prompt follows")
    kv_name: Name | None = Field(None, description="keep this prompt as a context")
    recall: Literal["selected", "exact"] | None = Field(
        None, description="record what each token recalled, for GET /v1/recalls/ID; exact: and what the exact top-k is"
    )

    @property
    def outputs(self) -> int:
        """Outputs of each prompt."""
        return int(getattr(self, "n", 1))

    @property
    def json_format(self) -> JsonSchema | None:
        """The JSON that the output must be. None: the output may be any text."""
        return None

    @property
    def call_rules(self) -> CallRules | None:
        """What a grammar is to enforce of calls; None for nothing."""
        return None

    @property
    def call_names(self) -> list[str]:
        """Functions whose calls the answer may have."""
        return []

    @property
    def plain_tools(self) -> list[dict[str, Any]]:
        """The functions that the model may call, as chat templates read them."""
        return []

    def filled(self, defaults: Mapping[str, float]) -> Self:
        """Return the request with default values for omitted fields."""
        return self.model_copy(update={name: value for name, value in defaults.items() if name not in self.model_fields_set})

    def check(self) -> None:
        """Raise ApiError for fields that do not go together."""
        if self.recall is not None and self.outputs > 1:
            raise ApiError(400, f"recall is given with n={self.outputs}; one output is recorded", param="recall")

    @property
    def wanted(self) -> dict[str, Any]:
        """The settings of `Sampling` that this kind of request names otherwise than others."""
        raise NotImplementedError

    def sampling(self, grammar: Grammar | None) -> Sampling:
        """Return the sampling settings of an output; raises ConfigError."""
        same = {one.name for one in fields(Sampling)} & type(self).model_fields.keys()
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given |= {"top_k": self.top_k if self.top_k > 0 else None, "include_stop": self.include_stop_str_in_output}
        given["seed"] = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(**given | self.wanted, grammar=grammar)


class NoTools(Body):
    """Of requests in which tools are not served."""

    tools: Annotated[list[Any], Only([], instead="/v1/chat/completions takes tools")] = Field([])
    tool_choice: Annotated[Any, Only("none", "auto")] = "none"


class Generation(Sampled):
    """What both kinds of completion take."""

    max_tokens: int | None = None
    n: int = Field(1, ge=1, le=128)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[_Bias, few(MOST_TOKEN_RULES)] = Field({})
    stop: _Stop = Field([])
    stream_options: StreamOptions | None = None
    metadata: Annotated[dict[str, str], Only({})] = Field({})
    response_format: Annotated[TextFormat | SchemaFormat, Field(discriminator="type")] | None = None

    @property
    def json_format(self) -> JsonSchema | None:
        return None if self.response_format is None else self.response_format.json_schema

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is given; it needs stream", param="stream_options")


class CompletionRequest(NoTools, Generation):
    """Of POST /v1/completions. max_tokens=0 with echo is the prompt alone."""

    prompt: Prompt
    max_tokens: Count | None = 16
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    best_of: Annotated[int, Only(1)] = 1
    suffix: Annotated[str, Only("")] = ""

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0; without echo it must be at least 1", param="max_tokens")

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, texts or tokens."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item, return-value]

    @property
    def wanted(self) -> dict[str, Any]:
        return {"max_tokens": max(1, self.max_tokens or 0), "prompt_logprobs": self.logprobs if self.echo else None}


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _joined(content: str | Sequence[TextPart | InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class FunctionCall(Body):
    """A function and its arguments, JSON of an object."""

    name: FunctionName
    arguments: str = Field(max_length=MOST_ARGUMENTS)

    def read(self) -> dict[str, Any]:
        """Return the arguments; raises ConfigError."""
        try:
            found = json.loads(self.arguments)
            json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"messages have a call of {self.name!r} whose arguments are not JSON of an object")
        return found


class ToolCall(Body):
    """A call in a message of the assistant. index, which streams have, has no effect."""

    id: Short
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Annotated[Count, Field(exclude=True)] = 0

    def plain(self) -> dict[str, Any]:
        """Return what chat templates read; raises ConfigError."""
        function = {"name": self.function.name, "arguments": self.function.read()}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    """A turn of a conversation. content may be null if there are tool_calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrList[str, Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]] = ""
    name: Short | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] = Field(default=[])
    tool_call_id: Short | None = None
    # of OpenAI's messages that are handed back
    annotations: Annotated[list[Any], Only([])] = Field(default=[], exclude=True)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needs = "tool_call_id" if self.role == "tool" and self.tool_call_id is None else ""
        needs = "content" if "content" not in self.model_fields_set and not self.tool_calls else needs
        if needs:
            raise PydanticCustomError("missing_field", "{needs}: Field required", {"needs": needs})
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise PydanticCustomError("role", "{says}", {"says": f"{name} is of messages whose role is {role}"})
        return self

    @property
    def size(self) -> int:
        """Number of characters of its text and of the arguments of its calls."""
        return len(_joined(self.content)) + sum(len(call.function.arguments) for call in self.tool_calls)

    def plain(self) -> dict[str, Any]:
        """Return what chat templates read; raises ConfigError for a call with wrong arguments."""
        calls = {"tool_calls": [call.plain() for call in self.tool_calls]} if self.tool_calls else {}
        others = {name: said for name in ("name", "tool_call_id") if (said := getattr(self, name))}
        return {"role": self.role, "content": _joined(self.content)} | others | calls


class NamedFunction(Body):
    """The function to call."""

    name: FunctionName


class Function(NamedFunction):
    """A function that the model may call.

    strict: its arguments satisfy the schema, and objects in them have only the named members.
    """

    description: Annotated[str, Field(max_length=1 << 15)] | None = None
    parameters: dict[str, Any] = Field({"type": "object", "properties": {}})
    strict: bool = False


class NamedTool(Body):
    """The function to call, as chat completions name it."""

    type: Literal["function"]
    function: NamedFunction


class Tool(NamedTool):
    """A function that the model may call, as chat completions name it."""

    function: Function


class ChatRequest(Generation):
    """Of POST /v1/chat/completions."""

    messages: Several[Message]
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] = Field([])
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("text")] | Annotated[NamedTool, Tag("object")],
        either(_choice, "it must be a string or an object"),
    ] = "auto"
    functions: Annotated[list[Any], Only([], instead="use tools")] = Field([])
    function_call: Annotated[str, Only("none", "auto")] = "none"
    modalities: Annotated[list[str], Only(["text"])] = Field(["text"])
    reasoning_effort: Annotated[str, Only("none")] = "none"
    verbosity: Annotated[str, Only("medium")] = "medium"

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is given; it needs logprobs", param="top_logprobs")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        names, choice = [tool.function.name for tool in self.tools], self.tool_choice
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            raise ApiError(400, f"tools has two functions named {twice!r}", param="tools")
        if choice not in ("none", "auto") and not names:
            raise ApiError(400, "tool_choice asks for a call; tools has no function", param="tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            says = f"tool_choice names {choice.function.name!r}, which is not in tools"
            raise ApiError(400, says, param="tool_choice")
        if self.call_names and self.json_format is not None:
            says = "response_format asks for JSON; with tools it needs a tool_choice of none"
            raise ApiError(400, says, param="response_format")

    @property
    def call_names(self) -> list[str]:
        return [] if self.tool_choice == "none" else [tool.function.name for tool in self.tools]

    @property
    def call_rules(self) -> CallRules | None:
        choice, several, functions = self.tool_choice, self.parallel_tool_calls, [tool.function for tool in self.tools]
        if not functions or self.json_format is not None:
            return None
        if choice == "auto" and several and not any(each.strict for each in functions):
            return None
        if isinstance(choice, NamedTool):
            functions, several = [each for each in functions if each.name == choice.function.name], False
        required = choice not in ("none", "auto")
        schemas = {each.name: (each.parameters if required or each.strict else ANY_OBJECT, each.strict) for each in functions}
        return CallRules({} if choice == "none" else schemas, required, several)

    @property
    def plain_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude={"function": {"strict"}}, exclude_none=True) for tool in self.tools]

    @property
    def wanted(self) -> dict[str, Any]:
        new, likeliest = self.max_completion_tokens or self.max_tokens, (self.top_logprobs or 0) if self.logprobs else None
        return {"max_tokens": new, "logprobs": likeliest, "show_tokens": SPECIAL if self.tools else ()}


class InputPart(Body):
    """A part of a message in a request for a response. The annotations and logprobs of an earlier answer's parts have no
    effect."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Only([])] = Field([])
    logprobs: list[Any] = Field([])


class InputMessage(Body):
    """A turn of a conversation, or a message of an earlier response, whose id and status have no effect."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOrList[str, Annotated[list[InputPart], Field(max_length=MOST_PARTS, fail_fast=True)]]
    id: Short | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def message(self) -> Message:
        """Return it as chat completions have it."""
        return Message(role=self.role, content=_joined(self.content))


class ResponseText(Body):
    """How a response's text is to look."""

    format: Annotated[TextFormat | FlatSchemaFormat, Field(discriminator="type")] = TextFormat(type="text")
    verbosity: Annotated[str, Only("medium")] = "medium"


class ResponsesRequest(NoTools, Sampled):
    """Of POST /v1/responses. The server keeps no response, so that no request can refer to one by its id."""

    format_field = "text"
    input: TextOrList[Text, Several[InputMessage]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    text: ResponseText = ResponseText()
    include: Annotated[list[Literal["message.output_text.logprobs"]], Field(max_length=16, fail_fast=True)] = Field([])
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], few(16), Field(max_length=16)
    ] = Field({})
    stream_options: Annotated[dict[str, Any], Only({}, {"include_obfuscation": False})] = Field({})
    background: Annotated[bool, Only(False)] = False
    truncation: Annotated[str, Only("disabled")] = "disabled"
    reasoning: Annotated[dict[str, Any], Only({})] = Field({})

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.include:
            says = "top_logprobs is given; it needs include to name message.output_text.logprobs"
            raise ApiError(400, says, param="top_logprobs")

    @property
    def messages(self) -> list[Message]:
        """The conversation."""
        turns = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*turns, Message(role="user", content=self.input)]
        return [*turns, *(turn.message() for turn in self.input)]

    @property
    def json_format(self) -> JsonSchema | None:
        return self.text.format.json_schema

    @property
    def wanted(self) -> dict[str, Any]:
        return {"max_tokens": self.max_output_tokens, "logprobs": (self.top_logprobs or 0) if self.include else None}


class TokenizeRequest(Body):
    """Of POST /tokenize (vLLM's): a text, or a conversation through the chat template."""

    model: Short | None = None
    prompt: str | None = None
    messages: Several[Message] | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        """Raise ApiError unless one of prompt and messages is given."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give prompt or messages, and not both", param="prompt")


class DetokenizeRequest(Body):
    """Of POST /detokenize (vLLM's)."""

    model: Short | None = None
    tokens: Annotated[list[Token], Field(max_length=MOST_TOKENS, fail_fast=True)]


class RecallRun(Body):
    """Of POST /v1/recalls/ID/runs and /v1/recalls/ID/answers (kvthaw's): a method, that of the server by default, and how much it
    may attend. The method has no options, which could take any amount of memory."""

    method: Annotated[str, Field(max_length=64)] | None = None
    budget: int | None = Field(None, ge=1, lt=1 << 31)
    retrieved: int | None = Field(None, ge=1, lt=1 << 31)

    def check(self, capacity: int) -> None:
        """Raise ApiError for a method that the list of methods does not have, and for more tokens than a request may have."""
        if self.method is not None and self.method not in list(METHODS):
            raise ApiError(400, str(unknown_method(self.method, METHODS)), param="method")
        for name, limit in (("budget", self.budget), ("retrieved", self.retrieved)):
            if limit is not None and limit > capacity:
                raise ApiError(400, f"{name} is {limit}; it must be at most {capacity}, the context length", param=name)


class ContextRequest(Body):
    """Of POST /v1/contexts (kvthaw's): a text, a document that conversations are about, or messages, to be kept under a name. The
    latter two go through the chat template."""

    name: Name
    text: Text | None = None
    document: Text | None = None
    messages: Several[Message] | None = None
    cache_salt: str = Field("", max_length=256)
    wait: bool = Field(True, description="whether the answer comes when the document is kept; else at once, with a status")

    def check(self) -> None:
        """Raise ApiError unless exactly one of text, document and messages is given."""
        if sum(one is not None for one in (self.text, self.document, self.messages)) != 1:
            raise ApiError(400, "give one of text, document and messages", param="text")
