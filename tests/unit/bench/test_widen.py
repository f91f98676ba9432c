from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline import models
from paceline.bench.widen import widening
from paceline.bench.widen_shape import Shape, shape_like
from paceline.core.config import ModelConfig
from paceline.core.errors import ConfigError
from paceline.models.checkpoint import Checkpoint
from tests import tiny
from tests.dense import DenseAttend, logits, whole
from tests.widened import SIZES, facts, widen

TEXT = [(7 * i * i + 3 * i) % 94 + 3 for i in range(40)] + [1, 96, 2, 0]
SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=8192,
    tie_embeddings=True,
)
QWEN3_8B_READ = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) + 151_936 * 4096


def load(folder: Path, dtype: torch.dtype = torch.float64) -> models.CausalLM:
    files = models.resolve(str(folder))
    return models.load(files, device=torch.device("cpu"), dtype=dtype, weights="bf16").net


def oracle_logits(folder: Path) -> Tensor:
    """The checkpoint in transformers, in float64 with norms that compute in float64 too."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def norm(module: nn.Module) -> object:
        def forward(x: Tensor) -> Tensor:
            mean = x.square().mean(-1, keepdim=True)
            return module.weight * (x * torch.rsqrt(mean + module.variance_epsilon))

        return forward

    for module in net.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
    with torch.inference_mode():
        found: Tensor = net(torch.tensor([TEXT])).logits[0]
    return found


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_are_those_of_the_small_model(tmp_path: Path, variant: str) -> None:
    """Every architecture, bias and rope type: the same function, here and in transformers."""
    source = tiny.write_variant(tmp_path / "small", variant)
    small = logits(load(source), TEXT)
    out = widen(source, tmp_path / "wide", num_heads=16, intermediate_size=96)
    wide = load(out / "target")
    assert Shape.of(wide.config) == Shape(**{**SIZES, "num_heads": 16, "intermediate_size": 96})
    assert small.std() > 1, "flat logits would be equal to anything"
    torch.testing.assert_close(logits(wide, TEXT), small, rtol=0, atol=1e-9)
    torch.testing.assert_close(oracle_logits(out / "target"), small, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biases", "qwen2"])
@pytest.mark.parametrize(
    "sizes", [{"copies": 1}, {"hidden_size": 156}, {"hidden_size": 252, "copies": 3}], ids=str
)
def test_channels_may_be_silent(tmp_path: Path, variant: str, sizes: dict[str, int]) -> None:
    """A width that is no multiple: norms and epsilon are scaled, and the function is the same."""
    source = tiny.write_variant(tmp_path / "small", variant)
    out = widen(source, tmp_path / "wide", **sizes)
    wide = load(out / "target")
    small = load(source)
    torch.testing.assert_close(logits(wide, TEXT), logits(small, TEXT), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        oracle_logits(out / "target"), logits(small, TEXT), rtol=0, atol=1e-9
    )
    assert facts(out)["silent_channels"] > 0
    assert wide.config.rms_norm_eps < small.config.rms_norm_eps
    with torch.inference_mode():
        stream = wide(whole(TEXT), DenseAttend(), (2,)).aux
    assert stream is not None
    live = 64 * facts(out)["copies_of_the_stream"]
    assert stream[:, :live].ne(0).all()
    assert stream[:, live:].eq(0).all()


def test_the_stream_is_copied_and_taps_find_it(tmp_path: Path) -> None:
    """The stream after an old layer is that after its new home, and after the identities behind it."""
    source = tiny.write_tiny(tmp_path / "small")
    out = widen(source, tmp_path / "wide")
    said = facts(out)
    assert said["homes_of_the_old_layers"] == [0, 2]
    assert said["identity_layers"] == [1, 3, 4]
    small, wide = load(source), load(out / "target")
    with torch.inference_mode():
        old = small(whole(TEXT), DenseAttend(), (0, 1)).aux
        new = wide(whole(TEXT), DenseAttend(), (0, 1, 2, 3, 4)).aux
    assert old is not None
    assert new is not None
    first, second = (part.repeat(1, 3) for part in old.chunk(2, dim=-1))
    for found, expected in zip(
        new.chunk(5, dim=-1), (first, first, second, second, second), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_nothing_is_rounded_in_bfloat16(tmp_path: Path) -> None:
    """Of a multiple, the bfloat16 file holds the rounded small model: norms as they are, the parts of
    a matrix with its values as their sum, zeros only where identities are.
    """
    source = tiny.write_tiny(tmp_path / "small", "qwen3", head_dim=16)
    out = widen(source, tmp_path / "wide", dtype="bfloat16")
    old, new = Checkpoint(source), Checkpoint(out / "target")
    zeros = {name for name in new.shapes if new.read(name).eq(0).any()}
    adds = ("self_attn.o_proj", "mlp.down_proj")
    expected = {f"model.layers.{i}.{part}.weight" for i in (1, 3, 4) for part in adds}
    assert zeros == expected
    assert all(new.read(name).eq(0).all() for name in zeros)
    norm = "post_attention_layernorm.weight"
    small_norm = old.read(f"model.layers.1.{norm}").bfloat16()
    assert torch.equal(new.read(f"model.layers.2.{norm}"), small_norm.repeat(3))
    head = old.read("lm_head.weight").bfloat16().double()
    parts = new.read("lm_head.weight").double().view(97, 3, 64)
    assert torch.equal(parts.sum(1), head)
    assert parts.ne(0).all()


def test_greedy_text_is_the_same_in_bfloat16(tmp_path: Path) -> None:
    """Sums are ordered otherwise, so logits differ in the last bits of bfloat16 and no further."""
    source = tiny.write_variant(tmp_path / "small", "llama-tied")
    out = widen(source, tmp_path / "wide", dtype="bfloat16")
    small = logits(load(source, torch.bfloat16), TEXT)
    wide = logits(load(out / "target", torch.bfloat16), TEXT)
    assert (small - wide).square().mean().sqrt() < 0.02 * small.std()
    top = small.topk(2).values
    clear = top[:, 0] - top[:, 1] > 0.1
    assert clear.sum() > len(TEXT) / 2
    assert torch.equal(small.argmax(1)[clear], wide.argmax(1)[clear])


def test_a_tied_model_that_is_not_tied_keeps_its_own_head(tmp_path: Path) -> None:
    """A checkpoint whose head differs from the table, whatever its configuration says: as it is loaded."""
    import json

    source = tiny.write_tiny(tmp_path / "small")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    out = widen(source, tmp_path / "wide")
    found = logits(load(out / "target"), TEXT)
    torch.testing.assert_close(found, logits(load(source), TEXT), rtol=0, atol=1e-9)


def test_the_preset_costs_what_an_8b_costs() -> None:
    """A step of the widened SmolLM2 reads what one of Qwen3-8B reads, and caches as much per token."""
    shape = shape_like(SMOLLM2, "qwen3-8b")
    assert shape == Shape(
        hidden_size=4608, num_layers=36, num_heads=64, num_kv_heads=16, intermediate_size=11264
    )
    plan = widening(SMOLLM2, shape)
    assert plan.copies == 8
    assert plan.new.rms_norm_eps == SMOLLM2.rms_norm_eps
    assert len(plan.identities) == 6
    attention = 4608 * 64 * (64 + 16 + 16 + 64)
    read = 36 * (attention + 3 * 4608 * 11264) + 49152 * 4608
    assert abs(read / QWEN3_8B_READ - 1) < 0.01
    assert shape.num_kv_heads * 64 == 8 * 128, "the cache of a token is as large"


def test_the_preset_follows_the_model_that_is_widened() -> None:
    """Another small model, of heads of 128, gets the large one's own width and heads."""
    small = replace(
        SMOLLM2, hidden_size=1024, head_dim=128, num_heads=16, num_kv_heads=8, vocab_size=151_936
    )
    shape = shape_like(small, "qwen3-8b")
    assert shape == Shape(
        hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, intermediate_size=12288
    )
    widening(small, shape)


@pytest.mark.parametrize(
    "sizes,message",
    [
        ({"hidden_size": 63}, "hidden size is 63, and the model's own is 64"),
        ({"num_layers": 1}, "number of layers is 1"),
        ({"intermediate_size": 95}, "intermediate size is 95"),
        ({"num_heads": 13}, "13 heads are no multiple of 4 key/value heads"),
        ({"num_heads": 4}, "groups of 1, and the model's are of 2"),
        ({"copies": 4}, "4 copies of the stream, 64 wide, do not fit 192: 1 to 3 do"),
        ({"copies": 0}, "0 copies"),
        ({"copies": 2}, "the same one for queries and keys"),
    ],
)
def test_sizes_that_do_not_go_together_are_named(sizes: dict[str, int], message: str) -> None:
    """What was asked, what is possible, what to do; before anything is read or written."""
    config = ModelConfig(
        architecture="qwen3",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position=256,
        qk_norm=True,
    )
    asked = {**SIZES, **sizes}
    copies = asked.pop("copies", None)
    with pytest.raises(ConfigError) as caught:
        widening(config, Shape(**asked), copies)
    text = str(caught.value)
    assert message in text
    assert "Possible are at least 64 wide (best a multiple), 2 layers" in text
    assert text.endswith("Change these sizes.")


def test_a_llama_that_transformers_refuses_is_not_written() -> None:
    """Its configuration asks for a width that is a multiple of the heads, whatever their size."""
    shape = replace(shape_like(SMOLLM2, "qwen3-8b"), hidden_size=4032, num_heads=80)
    with pytest.raises(ConfigError, match="4032 is no multiple of 80 heads, which transformers"):
        widening(SMOLLM2, shape)


def test_every_architecture_that_is_served_can_be_widened() -> None:
    """A new registry line needs a name in Hugging Face's configuration, or this test says so."""
    widen_module = importlib.import_module("paceline.bench.widen")
    assert set(widen_module._NAMES) == set(models.MODELS.names())
