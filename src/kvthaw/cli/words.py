"""Sentences of generate and chat about an answer: its attention and its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvthaw.formatting import counted, human, seconds, share

if TYPE_CHECKING:
    from kvthaw.engine.hf import Cache

_MANY = 100
"""Fewest tokens of a prompt whose speed is printed: fewer measure the time of a step."""


def attended(cache: Cache) -> str:
    """Return a sentence about the tokens that each step attended to, with the reason if it attended to all."""
    stats, index = cache.stats(), cache.settings.method.name
    why = stats.no_choice
    if stats.method == "full":
        other = "" if index == "full" else f" --method {index} recalls instead."
        return f"Every step read all {counted(stats.tokens, 'token')}" + (f": {stats.reason}.{other}" if stats.reason else ".")
    if why:
        return f"{stats.method}: there was nothing to choose, {why}."
    return f"{stats.method}: each step read {stats.attended_mean or 0:,.0f} of {counted(stats.tokens, 'token')}."


def took(prefilled: int, kept: int, first_s: float | None, token_s: float | None, new: int) -> str:
    """Return a sentence about the time of an answer.

    prefilled: tokens of the prompt that were prefilled.
    kept: tokens of the prompt that were in the cache.
    """
    if first_s is None:
        return f"No token came after {counted(prefilled, 'token')} of prompt."
    rate = f", {prefilled / first_s:,.0f} per second" if prefilled >= _MANY and first_s > 0 else ""
    had = f"; {kept:,} {'was' if kept == 1 else 'were'} there already" if kept else ""
    then = "" if not token_s else f", then {seconds(token_s)} per token ({1 / token_s:,.1f} per second)"
    said = f"First token after {seconds(first_s)} (prompt: {counted(prefilled, 'token')}{rate}{had}){then}."
    return f"{said} {counted(new, 'token')}."


def details(cache: Cache) -> list[str]:
    """Return lines about the cache, for --verbose; what does not apply is left out."""
    stats = cache.stats()
    host = f", {human(stats.kv_host_bytes)} on the host" if stats.kv_host_bytes else ""
    dtype = f", rows in {stats.kv_dtype}" if stats.kv_dtype else ""
    lines = [f"KV: {human(stats.kv_device_bytes + stats.kv_dense_bytes)} on the device{host}{dtype}"]
    if stats.budget is not None:
        lines.append(f"budget: {stats.budget:,} tokens per KV head and step, at most {stats.attended_max or 0:,} used")
    if stats.hit_rate is not None:
        lines.append(f"selected rows: {share(stats.hit_rate)} on the device already, {human(stats.fetched_bytes)} fetched")
    if stats.dense_tokens:
        lines.append(f"later prompts: {counted(stats.dense_tokens, 'token')} attended to everything")
    if stats.reason:
        lines.append(f"why {stats.method}: {stats.reason}")
    if stats.captures:
        lines.append(f"captured steps: {stats.captures}, {seconds(stats.capture_seconds)}, {human(stats.capture_bytes)}")
    lines += filter(None, [stats.shrunk, *(f"{name} has no effect: {why}" for name, why in stats.no_effect.items())])
    return lines
