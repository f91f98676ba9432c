"""Tiny drafters for the tiny checkpoints, as real folders: the real loading code reads them.

Written from the formats' description, not with the package's own writers. A random drafter proposes
nonsense; `overfit_dflash` trains one on given texts until the target agrees with it, so that accepted
paths are exercised too.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline import models
from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode
from paceline.draft.dflash_checkpoint import load_plain, save
from paceline.draft.dflash_net import DFlashNet, block_tokens
from tests.dense import features_of, target_of
from tests.tiny_eagle3 import eagle3_truth, overfit_eagle3

MASK = 96  # the tiny vocabulary's last id; texts may hold it
DFLASH2: dict[str, Any] = {  # as z-lab writes it: the block's size is nested
    "architectures": ["DFlash2DraftModel"],
    "block_size": None,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 24,
    "use_sliding_window": True,
    "dflash_config": {
        "block_size": 5,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 12,
        "selector_top_k": 6,
    },
}


def dflash_config(target: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """A config.json in z-lab's layout; None leaves a key out, `dflash_config` keys are merged."""
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, target["num_hidden_layers"] - 1]}
    nested |= overrides.pop("dflash_config", {})
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "block_size": 4,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {k: v for k, v in nested.items() if v is not None},
        **overrides,
    }
    return {k: v for k, v in config.items() if v is not None or k == "rope_scaling"}


def dflash_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of that configuration, under z-lab's names."""
    hidden, inner, dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    nested = config["dflash_config"]
    second = config["architectures"] == ["DFlash2DraftModel"]
    ids = nested.get("target_layer_ids")
    taps = config["num_hidden_layers"] if ids is None else len(ids)  # the default: one a layer
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        for name, count in rows.items():
            shapes[f"layers.{i}.self_attn.{name}_proj.weight"] = (count, hidden)
            if config.get("attention_bias"):
                shapes[f"layers.{i}.self_attn.{name}_proj.bias"] = (count,)
        shapes[f"layers.{i}.self_attn.o_proj.weight"] = (hidden, heads * dim)
        if config.get("attention_bias"):
            shapes[f"layers.{i}.self_attn.o_proj.bias"] = (hidden,)
        for name, size in (("q_norm", dim), ("k_norm", dim)):
            shapes[f"layers.{i}.self_attn.{name}.weight"] = (size,)
        shapes[f"layers.{i}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"layers.{i}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (hidden,)
        if second:
            kernels = 2 * nested["conv_kernel_size"] * hidden // nested["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                base = (2, nested["conv_kernel_size"], hidden)
                shapes[f"layers.{i}.{name}.base_kernel"] = base
                shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (kernels, hidden)
    if second:
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (config["vocab_size"], nested["selector_rank"])
        projection = (nested["selector_rank"], hidden)
        shapes["candidate_selector.hidden_projection.weight"] = projection
    tensors = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        noise = torch.randn(*shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1.0 + 0.2 * noise
        elif name.endswith("base_kernel"):  # about the identity
            tensors[name] = 0.3 * noise
            tensors[name][:, 0] += 1.0
        else:
            tensors[name] = noise * (1.4 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
    return tensors


def write_dflash(
    folder: Path, target: Path, *, seed: int = 0, shards: int = 1, **overrides: Any
) -> Path:
    """Write a random DFlash drafter for the target checkpoint; returns the folder."""
    facts = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = dflash_config(facts, **overrides)
    tensors = dflash_tensors(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    homes = {
        n: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, n in enumerate(tensors)
    }
    for file in set(homes.values()):
        save_file({n: t for n, t in tensors.items() if homes[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@dataclass
class BlocksAttend:
    """Dense attention of n independent blocks over one text's context: the definition.

    A block row sees the context before its block's first position, and of its own block what the
    site says.
    """

    context: list[tuple[Tensor, Tensor]]  # per layer [T, Hkv, D]
    starts: Tensor  # [n] position of each block's first row
    block: int

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks, size = len(self.starts), self.block
        ck, cv = self.context[site.index]
        group = q.shape[1] // k.shape[1]
        keys = torch.cat([ck.expand(blocks, *ck.shape), k.view(blocks, size, *k.shape[1:])], 1)
        values = torch.cat([cv.expand(blocks, *cv.shape), v.view(blocks, size, *v.shape[1:])], 1)
        keys, values = (x.repeat_interleave(group, 2) for x in (keys, values))
        own = self.starts[:, None] + torch.arange(size)  # [n, b]
        at = torch.cat([torch.arange(len(ck)).expand(blocks, -1), own], 1)  # [n, T + b]
        in_block = torch.arange(at.shape[1]) >= len(ck)
        sees = in_block | (at < self.starts[:, None])
        sees = sees[:, None].expand(-1, size, -1).clone()
        if site.tail == "causal":
            sees &= at[:, None] <= own[:, :, None]
        if site.window is not None:
            sees &= own[:, :, None] - at[:, None] < site.window
        scores = torch.einsum("nihd,njhd->nhij", q.view(blocks, size, *q.shape[1:]), keys)
        weights = (scores * site.scale).masked_fill(~sees[:, None], -torch.inf).softmax(-1)
        return torch.einsum("nhij,njhd->nihd", weights, values).reshape(q.shape)


def blocks(
    net: DFlashNet, tokens: Sequence[int], starts: Sequence[int], features: Tensor
) -> Tensor:
    """Hidden states [n, b, H] of blocks that start at some positions of a text, all at once.

    Args:
        net: the drafter.
        tokens: the text.
        starts: positions of the blocks' first rows (of known tokens).
        features: [T, F] of the text's tokens, or of as many as the latest block may see.
    """
    at, size = torch.tensor(starts), net.config.block_size
    context = net.context(features, torch.arange(len(features)))
    ids = block_tokens(net.config, torch.tensor(tokens)[at])
    zero = torch.zeros(1, dtype=torch.int64)
    batch = ForwardBatch(
        mode=ForwardMode.BLOCK,
        num_rows=1,
        q_len=ids.numel(),
        rows=zero,
        token_ids=ids.view(-1),
        positions=(at[:, None] + torch.arange(size)).view(-1),
        slots=torch.full((ids.numel(),), -1),
        prefix_lens=zero,
        cu_q=torch.tensor([0, ids.numel()]),
        tail_lens=torch.tensor([ids.numel()]),
        mask=None,
        pages=torch.zeros(1, 1, dtype=torch.int32),
    )
    return net(batch, BlocksAttend(context, at, size)).hidden.view(len(at), size, -1)


def overfit_dflash(
    folder: Path, target: Path, texts: Sequence[Sequence[int]], *, steps: int = 60, **overrides: Any
) -> Path:
    """Train a DFlash drafter on texts of the target until it half knows them; returns the folder."""
    write_dflash(folder, target, **overrides)
    model, info = target_of(target, torch.float32)
    draw = random.Random(0)
    with torch.enable_grad():
        net = load_plain(folder, info, dtype=torch.float32)
        net.requires_grad_()
        features = [features_of(model, text, net.config.target_layer_ids) for text in texts]
        optimiser = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
        shift = 1 if net.config.sample_from_anchor else 0
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = 6e-3 * (1 - step / steps) + 1e-4
            chosen = draw.randrange(len(texts))
            text, known = texts[chosen], features[chosen]
            starts = draw.sample(range(1, len(text) - 1), min(24, len(text) - 2))
            hidden = blocks(net, text, starts, known)
            rows = torch.arange(net.config.block_size)
            wanted = torch.tensor(starts)[:, None] + rows + shift
            real = (wanted < len(text)) & (rows >= 1 - shift)
            answer = torch.tensor(text)[wanted[real]]
            loss = torch.nn.functional.cross_entropy(net.logits(hidden[real]), answer)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    save(net, folder, dtype=torch.float32)
    return folder


def dflash_truth(
    drafter: Any, net: models.CausalLM, tokens: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """What a DFlash cache must hold for a text: per layer keys and values [T, Hkv, D]."""
    mine: DFlashNet = drafter._block.net
    features = features_of(net, tokens, mine.config.target_layer_ids)
    return mine.context(features, torch.arange(len(tokens)), "token")


# How conformance tests get a drafter of each network: (folder, target, texts, steps) -> folder; what its
# cache must hold: (drafter, target network, tokens) -> keys and values of each layer, of all tokens but
# as many as the drafter looks ahead; and what else is to be tried of it, as engine options.
BUILDERS: Mapping[str, Callable[..., Path]] = {
    "dflash": overfit_dflash,
    "ddtree": overfit_dflash,
    "eagle3": overfit_eagle3,
}
TRUTHS: Mapping[str, Callable[..., list[tuple[Tensor, Tensor]]]] = {
    "dflash": dflash_truth,
    "ddtree": dflash_truth,
    "eagle3": eagle3_truth,
}
VARIANTS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("eagle3", {"eagle_topk": 3, "eagle_num_steps": 4}),
)
# What drafters that are made of others are tried with: without and with a network among them.
HOST_PARTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "merged": ({"parts": ("ngram", "suffix")},),
}
NETWORK_PARTS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "merged": (
        {"parts": ("suffix", "ddtree")},
        {"parts": ("suffix", "eagle3"), "eagle_topk": 3, "eagle_num_steps": 4},
    ),
}
