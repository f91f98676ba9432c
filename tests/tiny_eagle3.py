"""Tiny EAGLE-3 drafters for the tiny checkpoints, as real folders in each public layout.

Written from the formats' description, not with the package's own writers. A random drafter proposes
nonsense; `overfit_eagle3` trains one on given texts until the target agrees with it.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline import models
from paceline.core.batch import AttnSite
from paceline.draft.eagle3_checkpoint import load_plain, save
from paceline.draft.eagle3_net import Eagle3Net
from tests.dense import features_of, target_of

Layout = Literal["safeai", "specforge", "speculators"]
FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
TAPS = [0, 1, 1]  # outputs; the tiny targets have two layers


def eagle3_config(target: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """A config.json in SpecForge's layout; None leaves a key out."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS, "use_aux_hidden_state": True},
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": 60,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **overrides,
    }
    return {k: v for k, v in config.items() if v is not None or k == "rope_scaling"}


def drafted_ids(vocab_size: int, count: int) -> Tensor:
    """Some sorted ids [count] int64 of a vocabulary, not its first ones."""
    generator = torch.Generator().manual_seed(5)
    return torch.randperm(vocab_size, generator=generator)[:count].sort().values


def eagle3_tensors(
    config: Mapping[str, Any], seed: int = 0, ids: Tensor | None = None
) -> dict[str, Tensor]:
    """Random tensors of that configuration, under SafeAILab's names."""
    hidden, inner, dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    target = config.get("target_hidden_size", hidden)
    count = config.get("draft_vocab_size", config["vocab_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * target),
        "norm.weight": (hidden,),
        "lm_head.weight": (count, hidden),
    }
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * target,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(3)}
    if target != hidden:
        shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        shapes[f"midlayer.self_attn.{name}_proj.weight"] = (rows * dim, 2 * hidden)
        if config.get("qkv_bias"):
            shapes[f"midlayer.self_attn.{name}_proj.bias"] = (rows * dim,)
    shapes["midlayer.self_attn.o_proj.weight"] = (hidden, heads * dim)
    shapes["midlayer.mlp.gate_proj.weight"] = (inner, hidden)
    shapes["midlayer.mlp.up_proj.weight"] = (inner, hidden)
    shapes["midlayer.mlp.down_proj.weight"] = (hidden, inner)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (hidden,)
    tensors = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        noise = torch.randn(*shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1.0 + 0.2 * noise
        else:
            tensors[name] = noise * (1.4 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
    ids = drafted_ids(config["vocab_size"], count) if ids is None else ids
    tensors["d2t"] = ids - torch.arange(count)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
    tensors["t2d"][ids] = True
    return tensors


def in_layout(
    config: dict[str, Any], tensors: dict[str, Tensor], layout: Layout
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SpecForge's config and tensors as another project would write the same drafter."""
    if layout == "specforge":
        return config, tensors
    if layout == "safeai":  # says nothing of taps
        return {k: v for k, v in config.items() if k != "eagle_config"}, tensors
    flags = {flag: config.get(flag, False) for flag in FLAGS}
    draft = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [
            1 + i for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        ],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
    }
    own = {*flags, "architectures", "draft_vocab_size", "eagle_config", "tie_word_embeddings"}
    inner = {k: v for k, v in config.items() if k not in own}
    renamed = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    return {**draft, **flags, "transformer_layer_config": inner}, renamed


def write_eagle3(
    folder: Path,
    target: Path,
    *,
    layout: Layout = "specforge",
    seed: int = 0,
    ids: Tensor | None = None,
    **overrides: Any,
) -> Path:
    """Write a random EAGLE-3 drafter for the target checkpoint; returns the folder."""
    facts = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = eagle3_config(facts, **overrides)
    config, tensors = in_layout(config, eagle3_tensors(config, seed, ids), layout)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class UnrolledAttend:
    """Attention of a network fed by itself: step 0 is causal; entry i of a later step sees the
    step-0 entries up to i, and entry i of each step after.
    """

    steps: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        self.steps.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        (first, values), later = self.steps[0], self.steps[1:]
        far = torch.einsum("ihd,jhd->hij", q, first)
        far = far.masked_fill(torch.ones(far.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        near = [(q * key).sum(-1).T[:, :, None] for key, _ in later]
        weights = (torch.cat((far, *near), 2) * site.scale).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights[:, :, : len(first)], values)
        for i, (_, value) in enumerate(later):
            out = out + weights[:, :, len(first) + i].T[:, :, None] * value
        return out


def unrolled_loss(net: Eagle3Net, text: Tensor, aux: Tensor, steps: int) -> Tensor:
    """Cross-entropy of the texts's tokens, each step fed by the one before (paper, section 3.2)."""
    count = len(text) - 1 - steps  # entries that have an answer at every step
    to_draft = torch.full((net.config.vocab_size,), -100)
    to_draft[net.d2t] = torch.arange(len(net.d2t))
    feature, attend, loss = net.project(aux[:count]), UnrolledAttend(), torch.zeros(())
    for step in range(steps):
        embeds = net.embed(text[1 + step : 1 + step + count]).detach()
        out = net.layer(embeds, feature, torch.arange(count) + step, attend)
        answer = to_draft[text[2 + step : 2 + step + count]]
        loss = loss + torch.nn.functional.cross_entropy(net.logits(out), answer)
        feature = net.fed_back(out)
    return loss / steps


def overfit_eagle3(
    folder: Path, target: Path, texts: Sequence[Sequence[int]], *, steps: int = 60, **overrides: Any
) -> Path:
    """Train a drafter on texts of the target until it half knows them; returns the folder."""
    facts = json.loads((target / "config.json").read_text(encoding="utf-8"))
    size = eagle3_config(facts, **overrides)["draft_vocab_size"]
    common = [token for token, _ in Counter(t for text in texts for t in text).most_common(size)]
    rest = [token for token in range(facts["vocab_size"]) if token not in common]
    ids = torch.tensor(sorted((common + rest)[:size]))
    write_eagle3(folder, target, ids=ids, **overrides)
    model, info = target_of(target, torch.float32)
    draw = random.Random(0)
    with torch.enable_grad():
        net = load_plain(folder, info, dtype=torch.float32)
        net.requires_grad_()
        aux = [features_of(model, text, net.config.aux_layers) for text in texts]
        optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = 6e-3 * (1 - step / steps) + 1e-4
            chosen = draw.randrange(len(texts))
            loss = unrolled_loss(net, torch.tensor(texts[chosen]), aux[chosen], 3)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    save(net, folder, dtype=torch.float32)
    return folder


def eagle3_truth(
    drafter: Any, net: models.CausalLM, tokens: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """What an EAGLE-3 cache must hold for all tokens of a text but the last: keys and values."""
    mine: Eagle3Net = drafter.net
    aux = features_of(net, tokens[:-1], mine.config.aux_layers)
    after = torch.tensor(tokens[1:])
    return [mine.context(mine.embed(after), mine.project(aux), torch.arange(len(after)))]
