"""Scaled rotary positions, with which a model reads longer texts than its config allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvthaw.errors import ConfigError

LARGEST = 64
"""The largest factor."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: a model gets `factor` times its positions; low rotary frequencies are divided by the factor.

    Models that were not trained with it answer worse, also about short texts.
    """

    factor: float

    @classmethod
    def read(cls, text: str) -> RopeScaling:
        """Return what a text such as "yarn:4" names. Raises ConfigError for any other."""
        kind, _, factor = text.partition(":")
        try:
            found = cls(float(factor)) if kind == "yarn" else None
        except ValueError:
            found = None
        if found is None or not 1 < found.factor <= LARGEST:
            raise ConfigError(f'rope_scaling is {text!r}; it must be yarn and a factor above 1, at most {LARGEST}, as "yarn:4"')
        return found

    @classmethod
    def for_positions(cls, own: int, wanted: int) -> RopeScaling | None:
        """Return the least whole factor that gives a model of `own` positions as many as are wanted; None above the largest."""
        factor = -(-wanted // own)
        return cls(max(2, factor)) if factor <= LARGEST else None

    def apply(self, config: Any) -> None:
        """Scale the positions of a transformers config, in place; of several kinds of layers, the ones with full attention.

        Raises ConfigError for a model without rotary positions, and for one whose config scales them already.
        """
        config = config.get_text_config(decoder=True)
        ropes = getattr(config, "rope_parameters", None) or {}
        rope = ropes.get("full_attention", ropes)
        if "rope_theta" not in rope:
            raise ConfigError(f"rope_scaling is {self}; a {type(config).__name__} has no rotary positions to scale")
        if (kind := rope.get("rope_type", "default")) != "default":
            raise ConfigError(f"rope_scaling is {self}; the model's config scales its rotary positions already: {kind}")
        own = config.max_position_embeddings
        rope |= {"rope_type": "yarn", "factor": self.factor, "original_max_position_embeddings": own}
        config.max_position_embeddings = int(own * self.factor)

    def __str__(self) -> str:
        return f"yarn:{self.factor:g}"
