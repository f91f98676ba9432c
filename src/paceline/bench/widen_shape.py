"""The sizes of a widened target: given, or derived from what a step of a large model costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a widened target; the size of a head and the vocabulary stay."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int

    @staticmethod
    def of(config: ModelConfig) -> Shape:
        """The sizes of a model."""
        return Shape(**{name: getattr(config, name) for name in Shape.__dataclass_fields__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a large model's step is made of, by which a shape is chosen."""

    hidden_size: int
    num_layers: int
    query_width: int  # heads times their size
    kv_width: int
    read: int  # parameters that a step reads: layers and head


# Qwen3-8B (Qwen Team, arXiv 2505.09388): 36 layers of 4096, 32 query and 8 key/value heads of 128, 12288
# neurons, 151,936 tokens, an untied head.
_QWEN3_8B = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288) + 151_936 * 4096
COSTS: Mapping[str, Cost] = {
    "qwen3-8b": Cost(
        hidden_size=4096, num_layers=36, query_width=4096, kv_width=1024, read=_QWEN3_8B
    ),
}
_ROUND = 256  # neurons come in so many: whole tiles of a matrix product


def shape_like(config: ModelConfig, name: str) -> Shape:
    """Sizes at which a model costs what a large one does.

    The width is the next whole multiple of the old one, which needs no norm to change; layers, and the
    widths of queries and of keys and values, are the large model's; neurons make up for the difference in
    what a step reads.

    Args:
        config: the model to widen.
        name: of `COSTS`.
    """
    cost = COSTS[name]
    hidden = -(-cost.hidden_size // config.hidden_size) * config.hidden_size
    layers = max(cost.num_layers, config.num_layers)
    attention = 2 * hidden * (cost.query_width + cost.kv_width)
    read = (cost.read - config.vocab_size * hidden) / layers - attention
    return Shape(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=cost.query_width // config.head_dim,
        num_kv_heads=cost.kv_width // config.head_dim,
        intermediate_size=max(1, round(read / (3 * hidden) / _ROUND)) * _ROUND,
    )
