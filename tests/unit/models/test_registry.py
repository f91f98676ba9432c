from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from paceline import models
from paceline.api.tokenizer import Tokenizer
from paceline.core.errors import ConfigError
from paceline.layers.linear import Matrix
from paceline.models import gguf, hf
from tests import tiny
from tests.dense import greedy, logits
from tests.tiny_gguf import write_tiny_gguf


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float64) -> models.CausalLM:
    files = models.resolve(str(folder))
    return models.load(files, device=torch.device(device), dtype=dtype, weights="auto").net


def test_every_name_of_an_architecture_leads_to_a_network() -> None:
    """A name in either file format's table has a network, and its configuration says that name."""
    names = {*hf.ARCHITECTURES.values(), *gguf.ARCHITECTURES}
    assert names == set(models.MODELS)
    for name in models.MODELS:
        assert issubclass(models.MODELS.get(name), models.CausalLM)
    with pytest.raises(ConfigError, match="'gpt5'; known model architectures: llama, qwen2, qwen3"):
        models.MODELS.get("gpt5")


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_tiny_checkpoints_are_lively(tmp_path: Path, variant: str) -> None:
    """Tests of speculation need text that varies: logits spread, greedy text not stuck in one token."""
    net = load(tiny.write_variant(tmp_path, variant))
    assert 1.5 < float(logits(net, list(range(3, 60))).std()) < 3
    text = greedy(net, [11, 12, 13], 40)
    assert len(set(text)) >= 12
    assert sum(a == b for a, b in itertools.pairwise(text)) < 20


def test_tiny_checkpoints_follow_their_seed(tmp_path: Path) -> None:
    """The same seed writes the same bytes, another seed others."""
    files = [
        (tiny.write_tiny(tmp_path / str(i), seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((3, 3, 4))
    ]
    assert files[0] == files[1] != files[2]


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_tiny_checkpoints_speak(tmp_path: Path, form: str) -> None:
    """Their tokenizer, in either file format, is a real one: text, specials, partial UTF-8, chats."""
    path = tiny.write_tiny(tmp_path / "m")
    if form == "gguf":
        path = write_tiny_gguf(tmp_path / "m.gguf", path)
    tokenizer = Tokenizer.from_files(path)
    text = "the thing and a café of 1,234;\nThe End"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("é")) == 2, "a character of two tokens"
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat[0] == tiny.BOS
    assert tiny.EOS in chat
    assert max(chat) < tokenizer.vocab_size == 97
    assert tokenizer.eos_token_ids == (tiny.EOS,)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["llama-llama3", "qwen2-tied", "qwen3-yarn"])
def test_a_network_computes_the_same_on_a_gpu(tmp_path: Path, variant: str) -> None:
    """Device and dtype are arguments: on CUDA the logits are those of the CPU."""
    folder = tiny.write_variant(tmp_path, variant)
    text = [(3 * i * i + i) % 94 + 3 for i in range(32)]
    net = load(folder, "cuda")
    assert {t.device.type for t in (*net.parameters(), *net.buffers())} == {"cuda"}
    found = logits(net, text).cpu()
    torch.testing.assert_close(found, logits(load(folder), text), rtol=0, atol=1e-9)


@pytest.mark.gpu
def test_quantised_files_are_plain_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed products are for CPUs; on CUDA codes become plain weights of the dtype asked for."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    file = write_tiny_gguf(tmp_path / "m.gguf", tiny.write_tiny(tmp_path / "m"), Kind.Q4_1)
    net = load(file, "cuda", torch.bfloat16)
    matrices = [module.weight for module in net.modules() if isinstance(module, Matrix)]
    assert all(isinstance(w, Tensor) and w.is_cuda for w in matrices)
    assert all(w.dtype == torch.bfloat16 for w in matrices)
    assert logits(net, [5, 6, 7]).dtype == torch.float32
