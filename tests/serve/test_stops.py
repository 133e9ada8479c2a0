"""Stop strings over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from servers import serving

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def test_a_special_token_as_stop_string_ends_an_output(loaded: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = loaded
    with serving(model, tokenizer) as server:
        token = tokenizer.convert_tokens_to_ids("<s>")
        how: dict[str, Any] = {"prompt": "Hi", "max_tokens": 6, "logit_bias": {str(token): 100}, "stop": ["<s>"]}
        said = server.post("/v1/completions", **how).json()
        assert (said["choices"][0]["finish_reason"], said["choices"][0]["text"]) == ("stop", "")
        assert said["usage"]["completion_tokens"] == 1
