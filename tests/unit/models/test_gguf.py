from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from paceline import models
from paceline.core.config import RopeConfig
from paceline.core.errors import ModelError
from paceline.layers.rope import frequencies
from paceline.models.gguf import entries
from paceline.models.gguf_header import read_gguf_header
from paceline.models.gguf_weights import GGUFTensors
from paceline.ops.packed import Groups
from tests import tiny
from tests.dense import logits
from tests.tiny_gguf import write_tiny_gguf

TEXT = [(5 * i * i + i) % 94 + 3 for i in range(24)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def load(path: Path, dtype: torch.dtype = torch.float64) -> models.LoadedModel:
    files = models.resolve(str(path))
    return models.load(files, device=CPU, dtype=dtype, weights="bf16")


def tensors(path: Path, dtype: torch.dtype = torch.float32) -> GGUFTensors:
    header = read_gguf_header(path)
    config = models.read_config(models.resolve(str(path)))
    return GGUFTensors(path, entries(header, config), dtype)


@pytest.mark.parametrize(
    "variant",
    ["llama", "llama-tied", "llama-mha", "llama-head-dim", "mistral", "qwen2", "qwen3-tied"],
)
def test_a_gguf_file_is_the_checkpoint_it_was_made_from(tmp_path: Path, variant: str) -> None:
    """Names, row order, biases and configuration: an unquantised GGUF gives the checkpoint's bits."""
    folder = tiny.write_variant(tmp_path / "m", variant)
    theirs, ours = load(folder), load(write_tiny_gguf(tmp_path / "m.gguf", folder))
    # The epsilon went through float32; the file cannot say more.
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)
    same = dataclasses.replace(ours.config, rms_norm_eps=theirs.config.rms_norm_eps)
    assert same == theirs.config
    ours_named = dict(ours.net.named_parameters())
    assert ours_named.keys() == dict(theirs.net.named_parameters()).keys()
    for name, value in theirs.net.named_parameters():
        assert torch.equal(ours_named[name], value), name


@pytest.mark.parametrize(
    "kind",
    [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q5_0, Kind.Q5_1],
    ids=lambda kind: kind.name,
)
def test_every_format_dequantises_as_the_gguf_package_does(tmp_path: Path, kind: Kind) -> None:
    """Codes, scales and mins give exactly the values of the format's definition."""
    file = write_tiny_gguf(tmp_path / "m.gguf", tiny.write_tiny(tmp_path / "m", "qwen3"), kind)
    source = tensors(file)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
    for ours, theirs in (
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("model.embed_tokens.weight", "token_embd.weight"),
    ):
        assert reader[theirs].tensor_type == kind
        expected = torch.from_numpy(gguf.dequantize(reader[theirs].data, kind).copy())
        found = source.read(ours)
        assert isinstance(found, Groups) == (kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0))
        dense = found.dequantize(torch.float32) if isinstance(found, Groups) else found.float()
        assert torch.equal(dense, expected)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_rows_are_reordered_under_codes(tmp_path: Path, kind: Kind) -> None:
    """Undoing the converter's row order on codes is undoing it on the values."""
    folder = tiny.write_tiny(tmp_path / "m", "llama")
    source = tensors(write_tiny_gguf(tmp_path / "m.gguf", folder, kind))
    from safetensors.torch import load_file

    original = load_file(folder / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"model.layers.0.self_attn.{name}.weight"
        expected = gguf.dequantize(gguf.quantize(original[full].numpy(), kind), kind)
        found = source.read(full)
        assert isinstance(found, Groups)
        assert torch.equal(found.dequantize(torch.float32), torch.from_numpy(expected))


def test_scales_out_of_half_precisions_range_survive() -> None:
    """Q4_0's min is -8 times its scale: for large scales more than float16 holds."""
    from paceline.models.gguf_blocks import decode, split_blocks

    block = np.zeros((1, 1, 18), dtype=np.uint8)
    block[0, 0, :2] = np.array([60_000], dtype=np.float16).view(np.uint8)
    found = decode(2, split_blocks(2, block))
    assert isinstance(found, Groups)
    assert (found.dequantize(torch.float32) == -480_000).all()


def test_mixed_formats_load(tmp_path: Path) -> None:
    """Files that keep some tensors finer, fused parts among them, compute what their values say."""

    def kind(name: str) -> Kind:
        finer = {"attn_v": Kind.Q8_0, "ffn_down": Kind.Q5_0, "output.": Kind.F16}
        return next((k for part, k in finer.items() if part in name), Kind.Q4_0)

    folder = tiny.write_tiny(tmp_path / "m", "llama")
    loaded = load(write_tiny_gguf(tmp_path / "m.gguf", folder, kind))
    source = tensors(tmp_path / "m.gguf")
    net = loaded.net
    layer = "model.layers.0.self_attn.{}_proj.weight"
    parts = [source.read(layer.format(part)) for part in "qkv"]
    expected = torch.cat([part.dequantize(torch.float64) for part in parts])
    assert torch.equal(net.layers[0].attention.qkv.weight, expected)
    exact = logits(load(folder).net, TEXT)
    error = (logits(net, TEXT) - exact).square().mean().sqrt() / exact.std()
    assert 0.01 < error < 0.6, "near the unquantised model, but not equal to it"


def llama3_divisors(factor: float, context: int, low: float = 1.0) -> np.ndarray:
    plain, _ = frequencies(RopeConfig(), 16, 256)
    rope = RopeConfig(
        kind="llama3", factor=factor, original_max_position=context, low_freq_factor=low
    )
    return (plain / frequencies(rope, 16, 256)[0]).numpy()


ROPES: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], RopeConfig]] = {
    "none": ({"rope.freq_base": 5e5}, {}, RopeConfig(theta=5e5)),
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
        RopeConfig(kind="linear", factor=4.0),
    ),
    "yarn": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        {},
        RopeConfig(kind="yarn", factor=4.0, original_max_position=64),
    ),
    "llama3": (
        {},
        {"rope_freqs.weight": llama3_divisors(32.0, 8192)},
        RopeConfig(kind="llama3", factor=32.0, original_max_position=8192),
    ),
    "llama3 of a stated context": (
        {"rope.scaling.original_context_length": 64},
        {"rope_freqs.weight": llama3_divisors(8.0, 64)},
        RopeConfig(kind="llama3", factor=8.0, original_max_position=64),
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_is_read(tmp_path: Path, name: str) -> None:
    """GGUF's keys, and Llama 3's table of divisors, become the parameters that they came from."""
    keys, extra, expected = ROPES[name]
    folder = tiny.write_tiny(tmp_path / "m")
    file = write_tiny_gguf(tmp_path / "m.gguf", folder, keys=keys, extra=extra)
    assert load(file).config.rope == expected


REFUSED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], str]] = {
    "window": ({"attention.sliding_window": 64}, {}, r"sliding window \(64\); supported: full"),
    "experts": ({"expert_count": 8}, {}, "8 experts; supported: dense"),
    "partial rope": ({"rope.dimension_count": 8}, {}, "dimension_count is 8; supported: .* 16"),
    "longrope": (
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
        {},
        "rope scaling is 'longrope'; supported: none, linear, yarn",
    ),
    "old scaling": ({"rope.scale_linear": 4.0}, {}, "rope.scale_linear; supported"),
    "attention factor": (
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.attn_factor": 2.0,
        },
        {},
        "attn_factor is 2.0; supported: 1.0",
    ),
    "unknown divisors": (
        {},
        {"rope_freqs.weight": llama3_divisors(8.0, 8192, low=2.0)},
        "does not follow Llama 3's rule",
    ),
    "heads by layer": ({"attention.head_count": [4, 4]}, {}, "head_count must be .* it is a list"),
    "missing size": ({"block_count": None}, {}, "block_count must be a positive.* it is None"),
    "missing epsilon": (
        {"attention.layer_norm_rms_epsilon": None},
        {},
        "layer_norm_rms_epsilon must be a number, it is None",
    ),
    "heads": (
        {"attention.head_count_kv": 3},
        {},
        "4 heads, 3 key/value heads .* do not go together",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, name: str) -> None:
    """The message says what the file asks for, what is possible and what to do."""
    keys, extra, message = REFUSED[name]
    folder = tiny.write_tiny(tmp_path / "m")
    file = write_tiny_gguf(tmp_path / "m.gguf", folder, keys=keys, extra=extra)
    with pytest.raises(ModelError, match=f"(?s){message}.*Use a file without") as caught:
        load(file)
    assert str(file) in str(caught.value)


def test_parts_of_a_split_file_are_refused(tmp_path: Path) -> None:
    """One part of several holds half a model."""
    file = write_tiny_gguf(tmp_path / "m.gguf", tiny.write_tiny(tmp_path / "m"))
    header = read_gguf_header(file)
    split = dataclasses.replace(header, metadata={**header.metadata, "split.count": 3})
    from paceline.models.gguf import model_config

    with pytest.raises(ModelError, match=r"one of 3 parts; supported: whole files .join them"):
        model_config(split, file)


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    """The architectures that can be read are listed."""
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match="'mamba'; supported in GGUF files are llama, qwen2, qwen3"
    ):
        load(tmp_path / "m.gguf")


def change_kind(file: Path, name: str, kind: int) -> None:
    """Overwrite the format of one tensor in the file's table."""
    content = bytearray(file.read_bytes())
    at = content.index(name.encode()) + len(name)
    dimensions = int.from_bytes(content[at : at + 4], "little")
    at += 4 + 8 * dimensions
    content[at : at + 4] = kind.to_bytes(4, "little")
    file.write_bytes(content)


def test_unsupported_formats_are_named_all_at_once(tmp_path: Path) -> None:
    """Known formats by name, unknown ones by number, with how many tensors have them."""
    file = write_tiny_gguf(tmp_path / "m.gguf", tiny.write_tiny(tmp_path / "m"), Kind.Q8_0)
    for name, kind in (
        ("blk.0.attn_q.weight", Kind.I32),
        ("blk.1.attn_q.weight", Kind.I32),
        ("blk.1.ffn_up.weight", 213),
    ):
        change_kind(file, name, kind)
    message = (
        r"I32 \(2 tensors\), format 213 \(1 tensors\), which can't be read\. Supported are .*Q4_1"
    )
    with pytest.raises(ModelError, match=message):
        load(file)


def test_a_missing_tensor_is_named_as_in_a_checkpoint(tmp_path: Path) -> None:
    """Tensors that nothing uses are reported under the file's own name."""
    folder = tiny.write_tiny(tmp_path / "m")
    extra = {"blk.0.attn_sinks.weight": np.ones(4, dtype=np.float32)}
    file = write_tiny_gguf(tmp_path / "m.gguf", folder, extra=extra)
    with pytest.raises(ModelError, match=r"unexpected: blk\.0\.attn_sinks\.weight") as caught:
        load(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("cut", [1, 3000])
def test_a_truncated_file_is_said_with_its_sizes(tmp_path: Path, cut: int) -> None:
    """A download that stopped early is refused before anything is converted or kept."""
    file = write_tiny_gguf(tmp_path / "m.gguf", tiny.write_tiny(tmp_path / "m"), Kind.Q4_1)
    reader = gguf.GGUFReader(str(file))
    end = max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)
    content = file.read_bytes()
    file.write_bytes(content[: int(end) - cut])
    message = re.compile(
        r"is truncated: its tensors need [\d,]+ bytes, it has [\d,]+;.*Download it again"
    )
    with pytest.raises(ModelError, match=message):
        load(file)
    assert not list((tmp_path / "cache").glob("*.safetensors"))
