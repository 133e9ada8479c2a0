"""Metrics for Prometheus: vLLM's names with the prefix `kvthaw:`, and the cache's statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvthaw.cache.prefix_kept import PrefixStats
from kvthaw.engine.hf import Stats
from kvthaw.engine.scheduler import Scheduler

Metric = TypeVar("Metric", Counter, Gauge, Histogram)
_STEPS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_REQUESTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_SHARES = (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
_CACHE = {
    "attended_tokens": (
        "Tokens attended per KV head and step, on average; NaN while full attention reads all.",
        "attended_mean",
    ),
    "hit_rate": ("Share of the selected rows that were in the pool already.", "hit_rate"),
    "device_rate": ("Share of them that were copied from blocks on the device.", "device_rate"),
    "fetched_bytes": ("Bytes of KV brought from the host.", "fetched_bytes"),
}

_PREEMPTED = {
    "preemptions": "How often a request gave its place back.",
    "resumed": "How often one went on from host memory.",
    "recomputed": "How often one that had given its place back went through the model again.",
}
"""By attributes of the scheduler."""


class Metrics:
    """Metrics of one server, in a registry of their own."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self._registry, self._labels, self._scheduler = CollectorRegistry(), {"model_name": name}, scheduler
        running = self._metric(Gauge, "num_requests_running", "Requests that have a place.")
        running.set_function(lambda: len(scheduler.batch.requests))
        waiting = self._metric(Gauge, "num_requests_waiting", "Requests that wait for a place.")
        waiting.set_function(lambda: len(scheduler.waiting))
        self._preempted = {field: self._metric(Counter, f"num_{field}", text) for field, text in _PREEMPTED.items()}
        self._known = dict.fromkeys(self._preempted, 0)
        self.first_token = self._seconds("time_to_first_token", "From a request's arrival to its first token.", _REQUESTS)
        self.between_tokens = self._seconds("inter_token_latency", "Between two tokens of a request.", _STEPS)
        self.per_token = self._seconds("request_time_per_output_token", "The same, a request's mean.", _STEPS)
        self.whole = self._seconds("e2e_request_latency", "From a request's arrival to its end.", _REQUESTS)
        self.queued = self._seconds("request_queue_time", "From a request's arrival to its place.", _REQUESTS)
        self.prompt_tokens = self._metric(Counter, "prompt_tokens", "Tokens of prompts that went through the model.")
        looked_up = "Tokens of prompts that were looked up in the prefix cache."
        self._prefix = {
            "queries": self._metric(Counter, "prefix_cache_queries", looked_up),
            "hits": self._metric(Counter, "prefix_cache_hits", "Tokens of them that were there."),
        }
        self._looked_up = dict.fromkeys(self._prefix, 0)
        self.generation_tokens = self._metric(Counter, "generation_tokens", "Tokens generated.")
        self._finished = self._metric(Counter, "request_success", "Requests that ended.", "finished_reason")
        covered = "Share of the exact softmax that a sampled step of one layer and request covered, the mean of its heads."
        self.attention_mass = self._metric(Histogram, "attention_mass", covered, buckets=_SHARES)
        self._cache = {field: self._metric(Gauge, metric, text) for metric, (text, field) in _CACHE.items()}
        self._bytes = self._metric(Gauge, "kv_bytes", "Bytes of KV by place.", "place")

    def finished(self, reason: str) -> None:
        """Count a request that ended."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def cache(self, stats: Stats, prefix: PrefixStats | None) -> None:
        """Set the metrics of the cache and the prefix cache."""
        if prefix is not None:
            _follow(self._prefix, self._looked_up, prefix)
            self._bytes.labels(**self._labels, place="prefix").set(prefix.kept_bytes)
            self._bytes.labels(**self._labels, place="prefix_disk").set(prefix.disk_bytes)
        for field, gauge in self._cache.items():
            value = getattr(stats, field)
            gauge.set(math.nan if value is None else value)
        self._bytes.labels(**self._labels, place="device").set(stats.kv_device_bytes + stats.kv_dense_bytes)
        self._bytes.labels(**self._labels, place="host").set(stats.kv_host_bytes)

    def text(self) -> bytes:
        """Return all in Prometheus' text format."""
        _follow(self._preempted, self._known, self._scheduler)
        return generate_latest(self._registry)

    def _metric(self, kind: type[Metric], name: str, text: str, *labels: str, **more: Any) -> Metric:
        """Return a metric, without the model's name as a label where it has others to be set."""
        made = kind(f"kvthaw:{name}", text, ["model_name", *labels], registry=self._registry, **more)
        return made if labels else made.labels(**self._labels)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._metric(Histogram, f"{name}_seconds", text, buckets=buckets)


def _follow(counters: Mapping[str, Counter], known: MutableMapping[str, int], source: object) -> None:
    """Increase counters by the growth of the source's attributes of the same name.

    known: the attributes' values at the previous call.
    """
    for field, counter in counters.items():
        now = getattr(source, field)
        counter.inc(now - known[field])
        known[field] = now
