"""EAGLE-3's config.json: what each layout's keys mean, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelError
from paceline.draft.eagle3_config import Eagle3Config, default_taps
from paceline.draft.eagle3_layouts import read_config
from tests.tiny_eagle3 import eagle3_config, in_layout

TARGET = {"hidden_size": 64, "vocab_size": 97}


def read(folder: Path, values: dict[str, Any], num_target_layers: int = 32) -> Eagle3Config:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return read_config(folder, num_target_layers)


def speculators(**overrides: Any) -> dict[str, Any]:
    return {**in_layout(eagle3_config(TARGET), {}, "speculators")[0], **overrides}


@pytest.mark.parametrize("layers, taps", [(32, (1, 15, 28)), (36, (1, 17, 32)), (94, (1, 46, 90))])
def test_taps_that_are_not_named(tmp_path: Path, layers: int, taps: tuple[int, ...]) -> None:
    """The usual layers: as inputs 2, L // 2, L - 3; as outputs those of published configurations."""
    assert default_taps(layers) == taps
    values = eagle3_config(TARGET, eagle_config=None)
    assert read(tmp_path, values, layers).aux_layers == taps
    empty = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}
    assert read(tmp_path, values | empty, layers).aux_layers == taps


def test_taps_are_counted_as_the_layout_counts(tmp_path: Path) -> None:
    """[1, 46, 90] in `eagle_config` and [2, 47, 91] at the top level are the same streams."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = eagle3_config(TARGET, eagle_config={key: [1, 46, 90]})
    top = eagle3_config(TARGET, eagle_config=None, **{key: [2, 47, 91]})
    assert read(tmp_path, nested).aux_layers == (1, 46, 90)
    assert read(tmp_path, top).aux_layers == (1, 46, 90)
    assert read(tmp_path, {**nested, key: [2, 47, 91]}).aux_layers == (1, 46, 90)
    assert read(tmp_path, speculators(**{key: [2, 47, 91]})).aux_layers == (1, 46, 90)
    with pytest.raises(ModelError, match=r"top level means .*\(0, 45, 89\), in eagle_config"):
        read(tmp_path, {**nested, key: [1, 46, 90]})


def test_keys_that_a_file_leaves_out_are_transformers_own(tmp_path: Path) -> None:
    """speculators writes only what differs from the class's defaults."""
    values = speculators(transformer_layer_config={"num_hidden_layers": 1}, draft_vocab_size=7)
    config = read(tmp_path, values)
    assert (config.hidden_size, config.intermediate_size, config.num_heads) == (4096, 11008, 32)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (32, 128, 32000)
    assert config.max_position == 2048
    values["transformer_layer_config"]["model_type"] = "qwen3"
    config = read(tmp_path, values)
    assert config.qk_norm
    assert (config.vocab_size, config.max_position, config.head_dim) == (151936, 32768, 128)


def test_flags_in_either_place(tmp_path: Path) -> None:
    """NVIDIA's files have norm flags in `eagle_config`, SpecForge's at the top."""
    nested = {"eagle_config": {"norm_before_fc": True}}
    assert read(tmp_path, eagle3_config(TARGET, **nested)).norm_before_fc
    assert read(tmp_path, eagle3_config(TARGET, norm_before_fc=True)).norm_before_fc
    with pytest.raises(ModelError, match="norm_before_fc is False, but True in eagle_config"):
        read(tmp_path, eagle3_config(TARGET, norm_before_fc=False, **nested))


@pytest.mark.parametrize(
    "overrides, qkv, out",
    [
        ({}, False, False),
        ({"qkv_bias": True}, True, False),
        ({"attention_bias": True}, True, True),
        ({"attention_bias": True, "qkv_bias": False}, False, True),
    ],
)
def test_biases(tmp_path: Path, overrides: dict[str, Any], qkv: bool, out: bool) -> None:
    """attention_bias is of all four projections, qkv_bias wins for three."""
    config = read(tmp_path, eagle3_config(TARGET, **overrides))
    assert (config.qkv_bias, config.o_bias) == (qkv, out)


@pytest.mark.parametrize(
    "values, said",
    [
        (eagle3_config(TARGET, architectures=["LlamaForCausalLM"]), "the architecture LlamaFor"),
        (eagle3_config(TARGET, architectures=None), "the architecture none at all"),
        ({"speculators_model_type": "mlp"}, "a speculators model of type 'mlp'"),
        (eagle3_config(TARGET, num_hidden_layers=2), "num_hidden_layers is 2; supported: 1"),
        (eagle3_config(TARGET, draft_vocab_size=98), r"draft_vocab_size \(98\) exceeds"),
        (eagle3_config(TARGET, fc_norm=True, norm_before_fc=True), "are both true"),
        (eagle3_config(TARGET, fc_norm="yes"), "fc_norm must be true or false, it is 'yes'"),
        (eagle3_config(TARGET, brand_new=1), "may change what is computed: brand_new"),
        (eagle3_config(TARGET, eagle_config={"x": 1}), "computed: eagle_config.x"),
        (eagle3_config(TARGET, eagle_config=[1]), r"eagle_config must be an object, it is \[1\]"),
        (eagle3_config(TARGET, bias=True), "bias is True, a layout that is not supported"),
        (
            eagle3_config(TARGET, eagle_config={"use_aux_hidden_state": False}),
            "use_aux_hidden_state is False, a layout",
        ),
        (eagle3_config(TARGET, num_aux_hidden_states=5), "num_aux_hidden_states is 5, a layout"),
        (
            eagle3_config(TARGET, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
            r"must be 3 layer numbers, they are \[1, 2\]",
        ),
        (
            eagle3_config(TARGET, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, True, 3]}),
            "must be 3 layer numbers",
        ),
        (
            eagle3_config(TARGET, sliding_window=64, use_sliding_window=True),
            "attention uses a sliding window",
        ),
        (speculators(norm_before_residual=None), "vLLM reads as true and speculators as false"),
        (speculators(transformer_layer_config=3), "transformer_layer_config must be an object"),
        (
            speculators(transformer_layer_config={"model_type": "gpt_oss"}),
            "model_type is 'gpt_oss'; supported: llama, qwen3",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    """Another network than the file's would run without an error, so nothing is guessed."""
    with pytest.raises(ModelError, match=said):
        read(tmp_path, values)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    """One message for everything that is wrong with a file."""
    values = eagle3_config(TARGET, num_hidden_layers=2, head_dim=15, odd_key=1, norm_output=3)
    with pytest.raises(ModelError) as caught:
        read(tmp_path, values)
    for said in ("odd_key", "num_hidden_layers is 2", "(15) must be even", "norm_output must be"):
        assert said in str(caught.value)
