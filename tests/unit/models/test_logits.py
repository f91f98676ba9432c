from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import models
from paceline.core.errors import ConfigError
from tests import tiny
from tests.dense import DenseAttend, logits, whole

TEXT = [(7 * i * i + 3 * i) % 94 + 3 for i in range(40)] + [1, 96, 2, 0]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def load(folder: Path, dtype: torch.dtype) -> models.LoadedModel:
    files = models.resolve(str(folder))
    return models.load(files, device=torch.device("cpu"), dtype=dtype, weights="auto")


def oracle(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The same checkpoint in transformers; in float64 its norms, too, compute in float64."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle")
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def norm(module: nn.Module) -> object:
        def forward(x: torch.Tensor) -> torch.Tensor:
            mean = x.square().mean(-1, keepdim=True)
            return module.weight * (x * torch.rsqrt(mean + module.variance_epsilon))

        return forward

    if dtype == torch.float64:  # they go through float32, whatever the model's dtype
        for module in net.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = norm(module)
    return net


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, variant: str, dtype: torch.dtype) -> None:
    """Every architecture, rope type and option computes what its authors' code computes."""
    folder = tiny.write_variant(tmp_path, variant)
    with torch.inference_mode():
        expected = oracle(folder, dtype)(torch.tensor([TEXT])).logits[0]
    found = logits(load(folder, dtype).net, TEXT)
    assert found.dtype == dtype
    assert expected.std() > 1, "flat logits would be equal to anything"
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied"])
def test_taps_are_the_residual_stream(tmp_path: Path, variant: str) -> None:
    """A tapped layer gives the stream after it, before any norm, the last layer too; in the order asked."""
    folder = tiny.write_variant(tmp_path, variant)
    theirs = oracle(folder, torch.float64)
    streams: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(theirs.model.layers):
        layer.register_forward_hook(lambda _, __, out, i=index: streams.__setitem__(i, out))
    ours = load(folder, torch.float64).net
    with torch.inference_mode():
        theirs(torch.tensor([TEXT]))
        out = ours(whole(TEXT), DenseAttend(), (1, 0))
    expected = torch.cat([streams[1][0], streams[0][0]], dim=-1)
    torch.testing.assert_close(out.aux, expected, rtol=0, atol=1e-9)


def test_a_tap_changes_nothing(tmp_path: Path) -> None:
    """Hidden states have the same bits with taps and without."""
    net = load(tiny.write_tiny(tmp_path), torch.float32).net
    with torch.inference_mode():
        plain = net(whole(TEXT), DenseAttend())
        tapped = net(whole(TEXT), DenseAttend(), (0, 1))
    assert plain.aux is None
    assert torch.equal(plain.hidden, tapped.hidden)


def test_a_layer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """A drafter of another model is refused by name of the layers, not by an index error."""
    net = load(tiny.write_tiny(tmp_path), torch.float32).net
    with pytest.raises(ConfigError, match=r"tapped layers \[2, 39\] do not exist.*layers 0 to 1"):
        net(whole(TEXT), DenseAttend(), (1, 2, 39))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near(tmp_path: Path, dtype: torch.dtype) -> None:
    """16-bit weights and activations give the float64 logits to their precision, as float32."""
    folder = tiny.write_variant(tmp_path, "qwen3")
    exact = logits(load(folder, torch.float64).net, TEXT)
    found = logits(load(folder, dtype).net, TEXT)
    assert found.dtype == torch.float32
    error = (found - exact).square().mean().sqrt() / exact.std()
    assert error < (0.06 if dtype == torch.bfloat16 else 0.008)


def test_networks_do_not_share_anything(tmp_path: Path) -> None:
    """Two networks in one process: loading the second does not touch the first."""
    first = load(tiny.write_variant(tmp_path / "a", "llama"), torch.float64).net
    before = logits(first, TEXT)
    second = load(tiny.write_variant(tmp_path / "b", "llama-llama3", seed=9), torch.float64).net
    assert not torch.equal(logits(second, TEXT), before)
    assert torch.equal(logits(first, TEXT), before)


def test_weights_need_no_gradient_and_bytes_are_counted(tmp_path: Path) -> None:
    """Serving keeps no graph; the memory budget counts a tied table once, and the rope table.

    In float64, which no CPU kernel lays out anew with padding of its own.
    """
    loaded = load(tiny.write_variant(tmp_path, "llama-tied"), torch.float64)
    assert not any(p.requires_grad for p in loaded.net.parameters())
    assert not loaded.net.training
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert loaded.net.nbytes == 2 * stored + 256 * 16 * 4
    assert loaded.net.device.type == "cpu"
