"""The least time of a step: by hand for a small model, and the known figures of one H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import models
from paceline.bench.step_cases import parse_spec, shapes
from paceline.bench.step_report import draft_of
from paceline.core.config import ModelConfig
from paceline.cost.hardware import H200, Hardware
from paceline.cost.model import (
    Draft,
    Load,
    context_weights,
    head_weights,
    layer_weights,
    step_floor,
    token_nbytes,
)

SMALL = ModelConfig(
    architecture="qwen3",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position=64,
)
# 8 x (16 + 8 + 8) and 16 x 8 of attention, 3 x 8 x 12 of the MLP
LAYER = 8 * 32 + 16 * 8 + 288
READER = Hardware(name="reader", read_bandwidth=1.0, matmul_rate=1e30)
COMPUTER = Hardware(name="computer", read_bandwidth=1e30, matmul_rate=1.0)
DRAFT = Draft(layers=SMALL, block=4, positions=3, num_taps=2, target_hidden_size=8)


def test_weights_and_cache_by_hand() -> None:
    """Every matrix once: an omitted one would make the floor a promise that nothing keeps."""
    assert layer_weights(SMALL) == 2 * LAYER
    assert head_weights(SMALL) == 800
    assert token_nbytes(SMALL, 2) == 2 * 2 * (2 * 4) * 2
    assert context_weights(DRAFT) == 2 * 8 * 8 + 2 * (2 * 8 * 8)


def test_reading_by_hand() -> None:
    """Weights once for all sequences, keys and values once for all nodes, the head twice with a draft."""
    load = Load(sequences=3, context=10, nodes=5)
    plain = step_floor(SMALL, load, READER)
    assert plain.target == (2 * LAYER + 800) * 2
    assert plain.attention == 3 * 15 * 64
    assert plain.total == plain.target + plain.attention
    drafted = step_floor(SMALL, load, READER, DRAFT)
    assert drafted.target == plain.target
    assert drafted.draft == 2 * LAYER * 2
    assert drafted.draft_head == 800 * 2
    assert drafted.draft_attention == 3 * 14 * 64
    assert drafted.observe == context_weights(DRAFT) * 2


def test_computing_by_hand() -> None:
    """Two operations a weight and row; a query meets a key as score and as value."""
    load = Load(sequences=3, context=10, nodes=5, accepted=2.0)
    floor = step_floor(SMALL, load, COMPUTER, DRAFT)
    assert floor.target == 2 * (2 * LAYER + 800) * 15
    assert floor.attention == 4 * (3 * 5) * 15 * (2 * 16)
    assert floor.draft == 2 * 2 * LAYER * 12
    assert floor.draft_head == 2 * 800 * 9
    assert floor.observe == 2 * context_weights(DRAFT) * 6


@pytest.mark.parametrize(
    "spec,sequences,milliseconds",
    [
        ("none", 1, 3.6),
        ("none", 8, 3.9),
        ("none", 64, 6.3),
        ("dflash:qwen3-8b-dflash-b16", 1, 4.5),
        ("dflash:qwen3-8b-dflash-b16", 8, 5.3),
        ("dflash:qwen3-8b-dflash-b16", 64, 26),
        ("dflash:qwen3-8b-dflash-b8", 1, 4.5),
        ("dflash:qwen3-8b-dflash-b8", 8, 4.9),
        ("dflash:qwen3-8b-dflash-b8", 64, 14),
    ],
)
def test_floors_of_an_h200(spec: str, sequences: int, milliseconds: float) -> None:
    """What was reckoned by hand for Qwen3-8B's shapes at 1,024 tokens, within 5 %."""
    asked = parse_spec(spec)
    target = models.read_config(models.resolve(str(shapes()["qwen3-8b"])))
    load = Load(sequences=sequences, context=1024, nodes=asked.nodes)
    floor = step_floor(target, load, H200, draft_of(asked))
    assert floor.total * 1e3 == pytest.approx(milliseconds, rel=0.05)


def test_the_documented_floors_are_those_reckoned() -> None:
    """Who reads the page decides by these figures."""
    page = (Path(__file__).parents[3] / "docs" / "bench-steps.md").read_text(encoding="utf-8")
    forms = ("none", "dflash:qwen3-8b-dflash-b16", "dflash:qwen3-8b-dflash-b8")
    specs = [parse_spec(text) for text in (*forms, "ddtree:qwen3-8b-dflash-b16:32")]
    target = models.read_config(models.resolve(str(shapes()["qwen3-8b"])))
    for sequences in (1, 8, 64):
        loads = [Load(sequences=sequences, context=1024, nodes=s.nodes) for s in specs]
        floors = [
            step_floor(target, load, H200, draft_of(s)).total
            for s, load in zip(specs, loads, strict=True)
        ]
        row = " | ".join(f"{1e3 * floor:.2f}" for floor in floors)
        assert f"| {sequences} | {row} |" in page


def test_a_tree_of_32_nodes_costs_hardly_more_than_a_chain_of_16() -> None:
    """The tree's extra nodes share the chain's reads."""
    target = models.read_config(models.resolve(str(shapes()["qwen3-8b"])))
    times = [
        step_floor(target, Load(sequences=1, context=1024, nodes=s.nodes), H200, draft_of(s)).total
        for s in map(parse_spec, ("dflash:qwen3-8b-dflash-b16", "ddtree:qwen3-8b-dflash-b16:32"))
    ]
    assert times[1] / times[0] == pytest.approx(1.02, abs=0.005)


def test_the_shipped_drafters_have_about_a_billion_parameters() -> None:
    """What they are compared with has as many."""
    for name in ("qwen3-8b-dflash-b16", "qwen3-8b-dflash-b8"):
        draft = draft_of(parse_spec(f"dflash:{name}"))
        assert draft is not None
        fused = draft.num_taps * draft.target_hidden_size * draft.layers.hidden_size
        assert layer_weights(draft.layers) + fused == pytest.approx(1.05e9, rel=0.01)
    assert Path(shapes()["qwen3-8b"]).is_dir()
