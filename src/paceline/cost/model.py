"""The least time of a step, from shapes and a device's ceilings: what physics leaves to be won.

    target      every weight is read once, whatever the number of rows; the head over all tokens
    attention   keys and values of every row are read once, whatever the number of nodes
    draft       the draft layers over B x b tokens, and the target's head once more over their proposals
    observe     the draft's context path: tapped features of what was accepted to draft keys and values

Each line takes the longer of reading and computing; the lines follow one another. Not counted: picking,
the walk, trees, norms, rotations, activations, launches, the host. So a floor is no aim that can be
reached, but nothing goes below it.

Letters: B sequences, T tokens that the target verifies (B times nodes), L cached tokens of a sequence, b
block size, P proposed positions, H hidden size, Hq/Hkv heads, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paceline.core.config import ModelConfig
from paceline.cost.hardware import Hardware

_PER_WEIGHT = 2  # operations of a weight for one row: multiply, add


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A block drafter's network, as far as its cost goes."""

    layers: ModelConfig  # the draft layers in a model's words; vocabulary and head are the target's
    block: int  # b: tokens of a pass, masks and the newest token
    positions: int  # P: of which the head is asked
    num_taps: int  # tapped target layers
    target_hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a step does."""

    sequences: int  # B
    context: int  # L
    nodes: int  # tokens verified per sequence, root included
    nbytes: int = 2  # of a weight, key or value
    accepted: float = 1.0  # tokens that become final per sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds of each part; `total` is the step's."""

    target: float
    attention: float
    draft: float = 0.0
    draft_attention: float = 0.0
    draft_head: float = 0.0
    observe: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return float(sum(asdict(self).values()))


def layer_weights(config: ModelConfig) -> int:
    """Matrix elements of all layers: query, key, value, output, gate, up and down."""
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def head_weights(config: ModelConfig) -> int:
    """Elements of the projection to logits."""
    return config.vocab_size * config.hidden_size


def token_nbytes(config: ModelConfig, nbytes: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * nbytes


def step_floor(
    config: ModelConfig, load: Load, hardware: Hardware, draft: Draft | None = None
) -> Floor:
    """The least time of one decode step.

    Args:
        config: the target.
        load: what the step does.
        hardware: the ceilings.
        draft: the drafter's network; None: there is none.
    """
    tokens = load.sequences * load.nodes
    whole = layer_weights(config) + head_weights(config)
    target = _product(hardware, tokens, whole, load.nbytes)
    attention = _attention(hardware, config, load, load.nodes)
    if draft is None:
        return Floor(target=target, attention=attention)
    return Floor(
        target=target,
        attention=attention,
        draft=_product(
            hardware, load.sequences * draft.block, layer_weights(draft.layers), load.nbytes
        ),
        draft_attention=_attention(hardware, draft.layers, load, draft.block),
        draft_head=_product(
            hardware, load.sequences * draft.positions, head_weights(config), load.nbytes
        ),
        observe=_product(
            hardware,
            max(1, round(load.sequences * load.accepted)),
            context_weights(draft),
            load.nbytes,
        ),
    )


def context_weights(draft: Draft) -> int:
    """Matrix elements between tapped features and the draft layers' keys and values."""
    layers = draft.layers
    fused = draft.num_taps * draft.target_hidden_size * layers.hidden_size
    kv = 2 * layers.num_kv_heads * layers.head_dim * layers.hidden_size
    return fused + layers.num_layers * kv


def _product(hardware: Hardware, rows: int, weights: int, nbytes: int) -> float:
    """Seconds of products of `rows` rows with so many weights."""
    return hardware.product_seconds(
        rows, float(weights * nbytes), float(_PER_WEIGHT * weights * rows)
    )


def _attention(hardware: Hardware, config: ModelConfig, load: Load, queries: int) -> float:
    """Keys and values read once per sequence; a query meets a key twice, as score and as value."""
    keys = load.context + queries
    reading = load.sequences * keys * token_nbytes(config, load.nbytes) / hardware.read_bandwidth
    width = config.num_layers * config.num_heads * config.head_dim
    operations = 2 * _PER_WEIGHT * load.sequences * queries * keys * width
    return max(reading, operations / hardware.matmul_rate)
