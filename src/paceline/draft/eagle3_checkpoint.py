"""EAGLE-3 checkpoints: a folder with config.json and safetensors, read in three layouts, written in one.

Not here: what config.json means (`eagle3_layouts.py`), the vocabulary's maps (`eagle3_vocabulary.py`),
the network (`eagle3_net.py`), and whether a drafter predicts its target well.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.draft import checkpoint_folder, eagle3_vocabulary
from paceline.draft.eagle3_config import Eagle3Config
from paceline.draft.eagle3_layouts import FLAGS, FLAT, LAYERS, NESTED, read_config
from paceline.draft.eagle3_net import Eagle3Net, weight_rules
from paceline.draft.selftest_static import eagle3_findings, enforce
from paceline.models.checkpoint import Checkpoint
from paceline.models.weights import Placement
from paceline.models.weights import load as load_weights

if TYPE_CHECKING:
    from paceline.draft.base import TargetInfo
    from paceline.ops.packed import Groups

log = logging.getLogger(__name__)

_LAYER_NAMES = ("midlayer", "layers.0")  # SafeAILab's and SpecForge's; speculators' and vLLM's


def load(folder: Path, target: TargetInfo) -> Eagle3Net:
    """Read a drafter and check that it can belong to the target.

    Args:
        folder: in SafeAILab's, SpecForge's or speculators' layout.
        target: the target's facts and embedding.

    Returns:
        The network on the target's device, in its dtype.

    Raises:
        ModelError: files are missing or damaged, of a layout that is not supported, or tensors are
            missing, extra, misshapen or at odds with each other (all are listed).
        ConfigError: it was made for another target; everything that differs is listed.
    """
    # 16-bit at least: a drafter is small, and what it loses to rounding it loses in acceptance.
    placement = Placement(device=target.device, dtype=target.dtype, weights=target.weights)
    return _load(folder, target, placement).eval()


def load_plain(folder: Path, target: TargetInfo, *, dtype: torch.dtype) -> Eagle3Net:
    """`load` for training: plain parameters of any dtype, nothing packed.

    They need no gradients until `requires_grad_` says so. Raises as `load` does.
    """
    return _load(folder, target, _Unpacked(device=target.device, dtype=dtype))


def load_unmapped(folder: Path, target: TargetInfo, *, dtype: torch.dtype) -> Eagle3Net:
    """`load_plain` without the vocabulary's maps, for a folder whose maps are damaged.

    What the head's rows stand for is to be found out; the maps are the identity. Raises as `load`
    does, for everything else.
    """
    return _load(folder, target, _Unpacked(device=target.device, dtype=dtype), mapped=False)


class _Unpacked(Placement):
    """Every matrix stays a plain tensor, on a CPU too."""

    def matrix(self, value: Tensor | Groups) -> Tensor:
        """See `Placement`."""
        return self.plain(value)


def _load(
    folder: Path, target: TargetInfo, placement: Placement, *, mapped: bool = True
) -> Eagle3Net:
    config = read_config(folder, target.config.num_layers)
    enforce(eagle3_findings(config, target), folder)
    log.info("%s: taps the outputs of target layers %s", folder, config.aux_layers)
    net = Eagle3Net(config, target, dtype=placement.dtype, device="meta")
    source = Checkpoint(folder)
    ids, problems = torch.arange(config.draft_vocab_size), list[str]()
    if mapped:
        ids, problems = eagle3_vocabulary.read(source, config.vocab_size, config.draft_vocab_size)
    layer = next(
        (name for name in _LAYER_NAMES if any(t.startswith(f"{name}.") for t in source.shapes)),
        _LAYER_NAMES[0],
    )
    checked = checkpoint_folder.CheckedTensors(source)
    load_weights(net, checked, placement, rules=weight_rules(layer), problems=problems)
    checked.refuse()
    net.set_vocabulary(ids)
    net.place_tables(target.device)
    return net


def save(
    net: Eagle3Net,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int | None = None,
) -> None:
    """Write a drafter in SpecForge's layout, so that this and other engines can load it.

    Args:
        net: with plain weights.
        folder: replaced if it is there; its parent must exist.
        dtype: of the parameters in the file.
        shard_bytes: most bytes of tensors in one file.

    Raises:
        ModelError: the weights are packed, or the layout cannot say what the network is.
        OSError: the parent is missing, read-only or full; `folder` is as it was.
    """
    values = config_values(net.config, dtype)
    tables = eagle3_vocabulary.tables(net.d2t, net.t2d)
    checkpoint_folder.write(
        folder, values, net, dtype=dtype, shard_bytes=shard_bytes, tables=tables
    )


def config_values(config: Eagle3Config, dtype: torch.dtype) -> dict[str, object]:
    """The object of config.json that `read_config` reads as `config`.

    Raises:
        ModelError: it cannot be said in SpecForge's keys: normed queries and keys, or an embedding
            of its own beside a target of the same width.
    """
    unsaid = []
    if config.qk_norm:
        unsaid.append("queries and keys that are normed per head (qk_norm)")
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        unsaid.append("an embedding of its own at the target's width (own_embedding)")
    if unsaid:
        msg = (
            f"the drafter has {' and '.join(unsaid)}, which SpecForge's layout, the only one that is "
            "written, cannot say. Train a drafter without."
        )
        raise ModelError(msg)
    values: dict[str, object] = {
        "architectures": [FLAT],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.o_bias,
        "tie_word_embeddings": False,
        NESTED: {LAYERS: list(config.aux_layers), "use_aux_hidden_state": True},
    }
    values |= {key: True for key in FLAGS if getattr(config, key)}
    if config.qkv_bias != config.o_bias:
        values["qkv_bias"] = config.qkv_bias
    if config.logit_scale != 1.0:
        values["logit_scale"] = config.logit_scale
    return values | checkpoint_folder.rope_values(config.rope)
