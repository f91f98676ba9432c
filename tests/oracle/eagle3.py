"""EAGLE-3's network and drafting, written from the formulas over a checkpoint's own tensors.

Dense, one sequence, everything recomputed for every question; float64 in, float64 out. `config` is the
object of config.json in SafeAILab's or SpecForge's keys (norm flags at the top level), `tensors` are the
file's, under `midlayer`. Letters as in the paper: an entry is a token's embedding e and the feature g of
the position before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Config = Mapping[str, Any]


def norm(x: Tensor, gain: Tensor, config: Config) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * gain


def project(tensors: Tensors, config: Config, taps: Tensor) -> Tensor:
    """[T, 3 Ht] to [T, H]."""
    if config.get("norm_before_fc"):
        taps = norm(taps, tensors["input_norm.weight"], config)
    if config.get("fc_norm"):
        parts = taps.split(taps.shape[-1] // 3, -1)
        taps = torch.cat(
            [norm(x, tensors[f"fc_norm.{i}.weight"], config) for i, x in enumerate(parts)], -1
        )
    return taps @ tensors["fc.weight"].T


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Pairs (d, d + D/2) of [T, heads, D] turn by position * theta^(-2d/D)."""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions.to(torch.float64)[:, None] * speed)[:, None]
    # The package keeps its angles' cosines and sines in float32.
    cos, sin = (_float32(f, positions, half, theta) for f in (torch.cos, torch.sin))
    assert torch.allclose(cos, angle.cos(), atol=1e-4)
    one, two = x[..., :half], x[..., half:]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _float32(function: Any, positions: Tensor, half: int, theta: float) -> Tensor:
    speed = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    return function(positions.float()[:, None] * speed).double()[:, None]


def layer(
    tensors: Tensors,
    config: Config,
    embeds: Tensor,
    features: Tensor,
    positions: Tensor,
    sees: Tensor,
) -> Tensor:
    """Output stream [T, H] of T entries of which entry i attends to those j with sees[i, j]."""
    gain = {k: tensors[f"midlayer.{k}.weight"] for k in ("input_layernorm", "hidden_norm")}
    g = norm(features, gain["hidden_norm"], config)
    x = torch.cat((norm(embeds, gain["input_layernorm"], config), g), -1)
    dim, heads = config["head_dim"], config["num_attention_heads"]

    def heads_of(name: str) -> Tensor:
        y = x @ tensors[f"midlayer.self_attn.{name}_proj.weight"].T
        bias = tensors.get(f"midlayer.self_attn.{name}_proj.bias")
        return (y if bias is None else y + bias).view(len(x), -1, dim)

    theta = config["rope_theta"]
    q, k, v = rotate(heads_of("q"), positions, theta), heads_of("k"), heads_of("v")
    k = rotate(k, positions, theta)
    out = torch.zeros(len(x), heads, dim, dtype=x.dtype)
    for h in range(heads):
        mine = h // (heads // k.shape[1])
        scores = q[:, h] @ k[:, mine].T / math.sqrt(dim)
        out[:, h] = scores.masked_fill(~sees, -math.inf).softmax(-1) @ v[:, mine]
    stream = g if config.get("norm_before_residual") else features
    stream = stream + out.flatten(1) @ tensors["midlayer.self_attn.o_proj.weight"].T
    y = norm(stream, tensors["midlayer.post_attention_layernorm.weight"], config)
    gate, up = (y @ tensors[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    inner = gate * torch.sigmoid(gate) * up
    return stream + inner @ tensors["midlayer.mlp.down_proj.weight"].T


def logits(tensors: Tensors, config: Config, output: Tensor) -> Tensor:
    """[T, Vd] over the draft vocabulary."""
    head = tensors["lm_head.weight"].T
    return norm(output, tensors["norm.weight"], config) @ head * config.get("logit_scale", 1.0)


def after_path(
    tensors: Tensors,
    config: Config,
    embedding: Tensor,
    text: Sequence[int],
    taps: Tensor,
    path: Sequence[int],
) -> Tensor:
    """Output [H] of the entry of a path's last token, drafted token by token after a text.

    Args:
        tensors: the drafter's.
        config: the drafter's.
        embedding: [V, H].
        text: tokens, the newest (the root) included.
        taps: [len(text) - 1, 3 Ht], the target's for all but the newest.
        path: drafted tokens after the text, root excluded; may be empty.
    """
    features = project(tensors, config, taps)
    for drafted in range(len(path) + 1):
        known = [*text, *path[:drafted]]
        count = len(known) - 1  # entry i: token i + 1, feature i
        sees = torch.ones(count, count, dtype=torch.bool).tril()
        embeds = embedding[torch.tensor(known[1:])]
        output = layer(tensors, config, embeds, features, torch.arange(count), sees)[-1]
        fed = norm(output, tensors["norm.weight"], config) if config.get("norm_output") else output
        features = torch.cat((features, fed[None]))
    return output
