"""DFlash checkpoints in z-lab's layout: a folder with config.json and safetensors, read and written.

Not here: what config.json means (`dflash_config.py`), the network (`dflash_net.py`), and whether a
drafter predicts its target well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.draft import checkpoint_folder
from paceline.draft.dflash_config import (
    FIRST,
    FULL,
    SECOND,
    SLIDING,
    DFlashConfig,
    read_config,
    refuse_layout,
)
from paceline.draft.dflash_net import DFlashNet
from paceline.draft.selftest_static import dflash_findings, enforce
from paceline.models.checkpoint import Checkpoint, TensorSource
from paceline.models.weights import Placement
from paceline.models.weights import load as load_weights

if TYPE_CHECKING:
    from paceline.draft.base import TargetInfo
    from paceline.ops.packed import Groups

log = logging.getLogger(__name__)

Tensors: TypeAlias = Callable[[DFlashNet], TensorSource]


def load(folder: Path, target: TargetInfo, tensors: Tensors | None = None) -> DFlashNet:
    """Read a drafter and check that it can belong to the target.

    Args:
        folder: in z-lab's layout.
        target: the target's facts, embedding and head.
        tensors: where the network's tensors come from; default: the folder's safetensors.

    Returns:
        The network on the target's device, in its dtype, with the stacked context path ready.

    Raises:
        ModelError: files are missing or damaged, of a layout that is not supported, or tensors are
            missing, extra or misshapen (all are listed).
        ConfigError: it was made for another target; everything that differs is listed.
    """
    placement = Placement(device=target.device, dtype=target.dtype, weights=target.weights)
    net, source = _load(folder, target, placement, tensors or _safetensors(folder))
    rows = [
        placement.plain(source.read(f"layers.{i}.self_attn.{part}_proj.weight"))
        for i in range(net.config.num_layers)
        for part in "kv"
    ]
    net.stack(placement.matrix(torch.cat(rows)))
    return net.eval()


def load_plain(folder: Path, target: TargetInfo, *, dtype: torch.dtype) -> DFlashNet:
    """`load` for training: plain parameters of any dtype, nothing packed or stacked.

    They need no gradients until `requires_grad_` says so. Raises as `load` does.
    """
    placement = _Unpacked(device=target.device, dtype=dtype)
    return _load(folder, target, placement, _safetensors(folder))[0]


class _Unpacked(Placement):
    """Every matrix stays a plain tensor, on a CPU too."""

    def matrix(self, value: Tensor | Groups) -> Tensor:
        """See `Placement`."""
        return self.plain(value)


def _safetensors(folder: Path) -> Tensors:
    return lambda _: Checkpoint(folder)


def _load(
    folder: Path, target: TargetInfo, placement: Placement, tensors: Tensors
) -> tuple[DFlashNet, TensorSource]:
    config = read_config(folder)
    enforce(dflash_findings(config, target), folder)
    net = DFlashNet(config, target, dtype=placement.dtype, device="meta")
    source = tensors(net)
    _refuse_other_layouts(source, folder)
    checked = checkpoint_folder.CheckedTensors(source)
    load_weights(net, checked, placement)
    checked.refuse()
    net.rope.to(target.device)
    return net, source


def save(
    net: DFlashNet,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int | None = None,
) -> None:
    """Write a drafter in z-lab's layout, so that this and other engines can load it.

    Args:
        net: with plain weights.
        folder: replaced if it is there; its parent must exist.
        dtype: of the tensors in the file.
        shard_bytes: most bytes of tensors in one file.

    Raises:
        ModelError: the weights are packed.
        OSError: the parent is missing, read-only or full; `folder` is as it was.
    """
    values = config_values(net.config, dtype)
    checkpoint_folder.write(folder, values, net, dtype=dtype, shard_bytes=shard_bytes)


def config_values(config: DFlashConfig, dtype: torch.dtype) -> dict[str, object]:
    """The object of config.json that `read_config` reads as `config`.

    Raises:
        ModelError: it cannot be said in z-lab's keys: windows of several sizes, or causal and
            bidirectional layers mixed against the table.
    """
    sizes = {w for w in config.windows if w is not None}
    usual = tuple(w is not None for w in config.windows)
    if len(sizes) > 1 or (config.causal != usual and len(set(config.causal)) > 1):
        msg = (
            f"windows {config.windows} with causality {config.causal} cannot be written: z-lab's "
            "layout has one window size, and one causality for all layers or one by layer type. "
            "Use one of these."
        )
        raise ModelError(msg)
    nested: dict[str, object] = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
    }
    nested |= _unusual(config)
    name = FIRST if config.conv is None else SECOND
    values: dict[str, object] = {
        "architectures": [name],
        "auto_map": {"AutoModel": f"dflash.{name}"},
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "layer_types": [FULL if w is None else SLIDING for w in config.windows],
        "sliding_window": next(iter(sizes), None),
        "use_sliding_window": bool(sizes),
        "max_window_layers": config.num_layers,
        "dflash_config": nested,
    }
    if config.causal != usual:
        values["is_causal"] = config.causal[0]
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    return values | checkpoint_folder.rope_values(config.rope)


def _unusual(config: DFlashConfig) -> dict[str, object]:
    """Nested keys that are written only where they say something."""
    found = (
        ("sample_from_anchor", config.sample_from_anchor, False),
        ("input_embedding_scale", config.embedding_scale, 1.0),
        ("output_multiplier", config.logit_scale, 1.0),
        ("final_logit_softcapping", config.logit_softcap, None),
    )
    values: dict[str, object] = {key: value for key, value, usual in found if value != usual}
    if config.conv is not None:
        values |= {"conv_kernel_size": config.conv.taps, "conv_group_size": config.conv.group}
    if config.selector is not None:
        values |= {
            "selector_rank": config.selector.rank,
            "selector_top_k": config.selector.top_k,
        }
    return values


def _refuse_other_layouts(source: TensorSource, folder: Path) -> None:
    """Layouts that show in the tensors alone."""
    own = [n for n in source.shapes if n.split(".")[0] in {"lm_head", "embed_tokens", "d2t", "t2d"}]
    if own:
        refuse_layout(folder, f"a drafter with its own head or embedding ({', '.join(own)})")
    if (folder / "mask_embedding.pt").exists():
        refuse_layout(folder, "a mask embedding of its own (mask_embedding.pt, a pickled file)")
