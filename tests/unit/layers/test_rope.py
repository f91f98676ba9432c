from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.config import RopeConfig
from paceline.layers.rope import Rope, cos_sin_table, frequencies

P, D = 3000, 128
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, tuple[RopeConfig, dict[str, Any]]] = {
    "default": (RopeConfig(theta=1e6), {"rope_type": "default", "rope_theta": 1e6}),
    "linear": (
        RopeConfig(kind="linear", factor=3.0),
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    ),
    "llama3": (
        RopeConfig(kind="llama3", theta=5e5, factor=8.0, original_max_position=1024),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            **LLAMA3,
        },
    ),
    "yarn": (
        RopeConfig(kind="yarn", theta=1e6, factor=4.0, original_max_position=750),
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 750,
        },
    ),
    "yarn of the whole context": (
        RopeConfig(kind="yarn", factor=1.0, truncate=False),
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "truncate": False},
    ),
    "yarn without a ramp": (  # low == high: the ramp needs a width
        RopeConfig(kind="yarn", factor=2.0, beta_fast=4.0, beta_slow=4.0, original_max_position=24),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "beta_fast": 4.0,
            "beta_slow": 4.0,
            "original_max_position_embeddings": 24,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_equal_transformers(kind: str) -> None:
    """Angles, and so the last bit of every position's rotation, are those the model was trained with."""
    llama = pytest.importorskip(
        "transformers.models.llama.modeling_llama", reason="transformers is the oracle"
    )
    ours, theirs = KINDS[kind]
    config = llama.LlamaConfig(
        hidden_size=2 * D,
        num_attention_heads=2,
        max_position_embeddings=P,
        rope_parameters=dict(theirs),
    )
    rotary = llama.LlamaRotaryEmbedding(config)
    inverse, factor = frequencies(ours, D, P)
    assert torch.equal(inverse, rotary.inv_freq)
    assert factor == rotary.attention_scaling
    cos, sin = rotary(torch.zeros(1), torch.arange(P)[None])
    expected = torch.cat((cos[0, :, : D // 2], sin[0, :, : D // 2]), dim=-1)
    found = cos_sin_table(ours, D, P)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)  # the vectorised cos's last bit


def test_the_table_does_not_depend_on_the_models_dtype() -> None:
    """A bf16 model rotates by float32 angles; the table follows the module, and no checkpoint has it."""
    rope = Rope(RopeConfig(), 16, 64)
    assert rope.cos_sin.dtype == torch.float32
    assert not rope.state_dict()


def test_rotation_depends_on_distance_alone() -> None:
    """Products of rotated queries and keys do not change when both move by the same distance."""
    rope = Rope(RopeConfig(), 16, 512)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 16, dtype=torch.float64, generator=generator) for _ in range(2))

    def product(at: int, distance: int) -> float:
        rotated_q, _ = rope(q, q, torch.tensor([at + distance]))
        _, rotated_k = rope(k, k, torch.tensor([at]))
        return float((rotated_q * rotated_k).sum())

    assert product(0, 7) == pytest.approx(product(400, 7), abs=1e-4)
    assert product(0, 7) != pytest.approx(product(0, 8), abs=1e-2)
