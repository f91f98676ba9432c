"""What a DFlash config.json means: one table for masks and windows, and refusals of all else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import ModelError
from paceline.draft.dflash_checkpoint import config_values
from paceline.draft.dflash_config import DFlashConfig, default_taps, read_config
from tests.tiny_drafters import DFLASH2, dflash_config

TARGET = {"hidden_size": 64, "vocab_size": 97, "num_hidden_layers": 8}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
SECOND = DFLASH2["dflash_config"]
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


def read(folder: Path, **overrides: Any) -> DFlashConfig:
    values = dflash_config(TARGET, **overrides)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_config(folder)


@pytest.mark.parametrize(
    "options, windows, causal",
    [
        ({}, (None, None), (False, False)),
        ({"is_causal": True}, (None, None), (True, True)),
        ({"layer_types": ["full_attention"] * 2}, (None, None), (False, False)),
        (SLIDING, (9, 9), (True, True)),
        (SLIDING | {"use_sliding_window": True}, (9, 9), (True, True)),
        (SLIDING | {"is_causal": False}, (9, 9), (False, False)),
        (MIXED, (9, None), (True, False)),
        (MIXED | {"is_causal": True}, (9, None), (True, True)),
        (MIXED | {"dflash_config": {"causal": False}}, (9, None), (False, False)),
        (MIXED | {"is_causal": True, "dflash_config": {"causal": False}}, (9, None), (True, True)),
        (
            {"dflash_config": {"use_swa": True, "swa_window_size": 6}, "is_causal": False},
            (6, 6),
            (False, False),
        ),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 6}}, (6, 6), (True, True)),
        (  # as transformers derives layer types
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            (None, 9),
            (False, True),
        ),
        ({"use_sliding_window": False, "sliding_window": 9}, (None, None), (False, False)),
    ],
)
def test_masks_and_windows(
    tmp_path: Path,
    options: dict[str, Any],
    windows: tuple[int | None, ...],
    causal: tuple[bool, ...],
) -> None:
    """Every way in which public files say windows and causality, and who wins where two differ."""
    config = read(tmp_path, **options)
    assert config.windows == windows
    assert config.causal == causal


def test_values_nested_and_not(tmp_path: Path) -> None:
    """Values in dflash_config win over the top level; both places are read."""
    config = read(
        tmp_path,
        target_layer_ids=[5],
        dflash_config={"block_size": 7, "target_layer_ids": [1, 4, 7], "sample_from_anchor": True},
    )
    assert (config.block_size, config.target_layer_ids) == (7, (1, 4, 7))
    assert config.sample_from_anchor
    assert config.num_proposals == 7
    assert read(tmp_path, block_size=16).num_proposals == 15


def test_default_taps() -> None:
    """Without ids, taps are spread as the reference spreads them (rounding halves to even)."""
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(48, 8) == tuple(round(1 + i * 44 / 7) for i in range(8))
    assert default_taps(30, 1) == (15,)


def test_taps_need_not_equal_layers(tmp_path: Path) -> None:
    """Eight taps and two layers are a checkpoint like any other."""
    config = read(tmp_path, dflash_config={"target_layer_ids": list(range(8))})
    assert (len(config.target_layer_ids), config.num_layers) == (8, 2)


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 9.0,
}
WRITTEN = [
    {},
    DFLASH2,
    SLIDING,
    SLIDING | {"is_causal": False},
    MIXED,
    MIXED | {"is_causal": True},
    {"is_causal": True},
    {"rope_scaling": YARN},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"attention_bias": True, "rope_theta": 500_000.0},
    {
        "dflash_config": {
            "sample_from_anchor": True,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 20.0,
            "input_embedding_scale": 8.0,
            "target_layer_ids": [7, 1],
        }
    },
]


@pytest.mark.parametrize("options", WRITTEN)
def test_what_is_written_reads_back(tmp_path: Path, options: dict[str, Any]) -> None:
    """The written config.json means the same, in z-lab's keys."""
    config = read(tmp_path, **options)
    values = config_values(config, torch.bfloat16)
    assert values["architectures"] == options.get("architectures", ["DFlashDraftModel"])
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    assert read_config(tmp_path) == config


def test_what_cannot_be_said_is_not_written(tmp_path: Path) -> None:
    """Windows of two sizes have no key in the layout, and are refused rather than rounded."""
    import dataclasses

    config = dataclasses.replace(read(tmp_path), windows=(4, 5), causal=(True, True))
    with pytest.raises(ModelError, match="one window size"):
        config_values(config, torch.bfloat16)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size must be a positive"),
        ({"dflash_config": {"selector_rank": 256}}, "selector_rank belong to DFlash2DraftModel"),
        (
            DFLASH2 | {"dflash_config": SECOND | {"conv_group_size": 7}},
            "multiple of conv_group_size",
        ),
        ({"architectures": ["Eagle3DraftModel"]}, "the architecture Eagle3DraftModel"),
        ({"architectures": []}, "none at all"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type is 'domino'"),
        ({"dflash_config": {"attention_value_scale": 0.612}}, "attention_value_scale is 0.612"),
        ({"attention_sink_bias": True}, "attention_sink_bias is True"),
        ({"dflash_config": {"attention_mode": "mla"}}, "attention_mode is 'mla'"),
        ({"surprise": 1}, "unknown keys.*surprise"),
        ({"dflash_config": {"surprise": 1}}, "unknown keys.*dflash_config.surprise"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id must be a token id"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id must be a token id"),
        ({"block_size": 1}, "leaves no mask"),
        ({"block_size": 1_000_000}, "block_size is 1000000; supported: 256 at most"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; supported: 256 at most"),
        ({"block_size": None}, "block_size must be a positive whole number"),
        ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids must be layer numbers"),
        ({"dflash_config": {"target_layer_ids": ["1"]}}, "target_layer_ids must be layer numbers"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention; supported"),
        ({"layer_types": SLIDING["layer_types"]}, "need a window of 1 or more, it is None"),
        (SLIDING | {"use_sliding_window": False}, "use_sliding_window is false"),
        (SLIDING | {"is_causal": False, "sliding_window": 3}, "narrower than the block"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"head_dim": 15}, "must be even"),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    """What would be computed wrongly is refused, named, before any tensor is read."""
    with pytest.raises(ModelError, match=said):
        read(tmp_path, **options)


def test_all_problems_at_once(tmp_path: Path) -> None:
    """One run shows everything that is wrong with a configuration."""
    with pytest.raises(ModelError) as caught:
        read(
            tmp_path,
            block_size=0,
            hidden_act="gelu",
            surprise=1,
            dflash_config={"target_layer_ids": "all", "shift_label": True},
        )
    for said in ("block_size", "hidden_act", "surprise", "target_layer_ids", "shift_label"):
        assert said in str(caught.value)
