from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import models
from paceline.core.errors import ModelError
from paceline.models import weights
from paceline.models.checkpoint import Checkpoint
from paceline.models.weights import Placement, bind, save
from paceline.ops.packed import Groups, quantize
from tests import tiny
from tests.dense import logits

TEXT = [5, 6, 7, 8, 9, 5, 6, 7]
CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> models.LoadedModel:
    files = models.resolve(str(folder))
    return models.load(files, device=CPU, dtype=dtype, weights="auto")


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Change a checkpoint's tensors; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_the_table_covers_every_parameter_once(tmp_path: Path, variant: str) -> None:
    """No parameter is left uninitialised, none is loaded twice, no tensor of the file is left over."""
    folder = tiny.write_variant(tmp_path, variant)
    net = load(folder).net
    bound = Counter((id(b.module), b.attribute) for b in bind(net))
    assert set(bound.values()) == {1}
    assert len(bound) == len(list(net.parameters())) + weights.packed_kinds(net).total()
    sources = [name for b in bind(net) for name in b.sources]
    assert sorted(sources) == sorted(Checkpoint(folder).shapes)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_saved_is_what_was_loaded(tmp_path: Path, variant: str) -> None:
    """The table read backwards writes the same names and bits; that file loads again."""
    folder = tiny.write_variant(tmp_path / "m", variant)
    original = Checkpoint(folder)
    expected = {name: original.read(name) for name in original.shapes}
    net = load(folder).net
    for file in folder.glob("model*safetensors*"):
        file.unlink()
    save(net, folder / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(logits(load(folder).net, TEXT), logits(net, TEXT))


def test_packed_weights_are_not_saved(tmp_path: Path) -> None:
    """A file of rounded weights under the exact model's name would be a lie."""

    class Packed:
        shape = (64, 64)
        kind = "x"

        def plain(self) -> None:
            """The exact values are gone."""

    net = load(tiny.write_tiny(tmp_path)).net
    net.layers[1].attention.out.set_weight(Packed())
    with pytest.raises(ModelError, match=r"weights are packed.*Load the model with weights='bf16'"):
        save(net, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    assert weights.packed_kinds(net)["x"] == 1


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """Missing, unexpected and misshapen tensors come in one message, by layer pattern, with shapes."""
    tiny.write_tiny(tmp_path, num_hidden_layers=4)
    layer = "model.layers.{}.{}.weight"
    changes: dict[str, Tensor | None] = {
        layer.format(i, "self_attn.q_proj"): None for i in range(4)
    }
    changes |= {layer.format(i, "mlp.down_proj"): torch.zeros(64, 95) for i in (0, 1, 3)}
    changes |= {layer.format(i, "self_attn.q_norm"): torch.zeros(16) for i in (2,)}
    changes |= {"model.norm.weight": None, "model.extra": torch.zeros(1)}
    edit(tmp_path, changes)
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [
        "  - missing: model.layers.{0-3}.self_attn.q_proj.weight",
        "  - missing: model.norm.weight",
        "  - unexpected: model.extra",
        "  - unexpected: model.layers.2.self_attn.q_norm.weight",
        "  - wrong shape [64, 95] instead of [64, 96]: model.layers.{0-1,3}.mlp.down_proj.weight",
    ]
    assert str(tmp_path) in lines[0]
    assert "Check that" in lines[-1]


def test_more_layers_than_configured_are_unexpected(tmp_path: Path) -> None:
    """A config that names fewer layers than the file has is a mistake, not a wish."""
    tiny.write_tiny(tmp_path, num_hidden_layers=3)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.2\.input_layernorm\.weight"):
        load(tmp_path)


def test_a_bias_that_the_configuration_denies_is_unexpected(tmp_path: Path) -> None:
    """A bias in the file that the network would drop changes every logit."""
    tiny.write_tiny(tmp_path)
    edit(tmp_path, {"model.layers.1.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_tables_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """Rope tables that older files carry follow from the configuration."""
    tiny.write_tiny(tmp_path)
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(tmp_path)


def test_the_copy_of_a_tied_table_is_passed_over(tmp_path: Path) -> None:
    """A tied checkpoint may store the table twice; the network keeps it once."""
    tiny.write_tiny(tmp_path, tie_word_embeddings=True)
    before = logits(load(tmp_path).net, TEXT)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit(tmp_path, {"lm_head.weight": table.clone()})
    loaded = load(tmp_path)
    assert loaded.net.lm_head is None
    assert torch.equal(logits(loaded.net, TEXT), before)


def test_a_tied_model_with_a_head_of_its_own_is_untied(tmp_path: Path) -> None:
    """Where the configuration says tied and the tensors differ, the tensors are right, and it is noted."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    tiny.write_tiny(tmp_path, tie_word_embeddings=True)
    head = 0.1 * torch.randn(97, 64, generator=torch.Generator().manual_seed(0))
    edit(tmp_path, {"lm_head.weight": head})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    loaded = load(tmp_path)
    assert not loaded.config.tie_embeddings
    assert any("untied" in note for note in loaded.notes)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(logits(loaded.net, TEXT), expected, rtol=0, atol=2e-5)


class Source:
    """A checkpoint in memory."""

    def __init__(self, tensors: dict[str, Tensor | Groups]) -> None:
        self.where = Path("memory")
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor | Groups:
        return self.tensors[name]


@pytest.mark.parametrize("kinds", [{}, {"v_proj": 8}, {"v_proj": None, "up_proj": 8}])
def test_fused_parts_of_any_kinds_load(tmp_path: Path, kinds: dict[str, int | None]) -> None:
    """Parts of one kind are joined as codes, parts of unlike kinds dequantised: the same matrix."""
    folder = tiny.write_tiny(tmp_path)
    whole = Checkpoint(folder)
    tensors: dict[str, Tensor | Groups] = {}
    plain: dict[str, Tensor | Groups] = {}
    for name in whole.shapes:
        value = whole.read(name)
        bits = next((b for part, b in kinds.items() if part in name), 4)
        if value.ndim == 2 and bits is not None:
            tensors[name] = quantize(value, bits=bits)
            plain[name] = tensors[name].dequantize(torch.float64)
        else:
            tensors[name] = plain[name] = value
    nets = []
    for source in (tensors, plain):
        net = models.MODELS.get("llama")(load(folder).config, dtype=torch.float64, device="meta")
        weights.load(net, Source(source), Placement(device=CPU, dtype=torch.float64))
        nets.append(net)
    assert torch.equal(logits(nets[0], TEXT), logits(nets[1], TEXT))


def test_packing_is_asked_for_matrices_on_a_cpu_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix goes through `pack` with the mode asked for; norms do not, nor does another device."""
    asked: list[tuple[int, str, torch.dtype]] = []

    def pack(weight: Tensor | Groups, mode: str, dtype: torch.dtype) -> Tensor:
        asked.append((len(weight.shape), mode, dtype))
        return weight.to(dtype)

    monkeypatch.setattr(weights, "pack", pack)
    files = models.resolve(str(tiny.write_tiny(tmp_path)))
    models.load(files, device=CPU, dtype=torch.bfloat16, weights="8bit")
    assert asked == [(2, "8bit", torch.bfloat16)] * (2 + 4 * 2)
    asked.clear()
    models.load(files, device=torch.device("meta"), dtype=torch.bfloat16, weights="8bit")
    assert asked == []
