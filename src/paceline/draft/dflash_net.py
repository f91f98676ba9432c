"""DFlash's network: context keys from the target's features, and a block of masks filled in one pass.

DFlash (Chen, Liang, Liu; arXiv 2602.06036) drafts a whole block at once. What it knows of the text
are the target's tapped residual streams: fused once (`fc`, `hidden_norm`), they become keys and values
of every draft layer without passing through queries, outputs or MLPs (`context`). The block itself,
[newest token, MASK, MASK, ...], runs through the layers as an ordinary pass (`forward`) that attends to
those keys and to itself. A context key depends on the target's features at its own position alone, so
it may be cached, shared and evicted exactly as the target's own.

The same class serves and trains: serving passes a paged `Attend` whose pool holds the context,
training one that holds `context`'s result itself.

Not here: configurations (`dflash_config.py`), files (`dflash_checkpoint.py`), proposals and the
cache's upkeep (`dflash.py`).

Letters: T tokens, F = K x target hidden size (K tapped layers), H hidden size, L draft layers, Hq/Hkv
heads, D head size, M positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from paceline import ops
from paceline.core.batch import Attend, ForwardBatch, ForwardOutput
from paceline.draft.dflash2 import Selector
from paceline.draft.dflash_config import DFlashConfig
from paceline.draft.dflash_layer import DFlashLayer
from paceline.layers.decoder import Decoder
from paceline.layers.linear import Linear
from paceline.layers.norm import RMSNorm
from paceline.layers.rope import Rope
from paceline.models.weights import Concat, Single, WeightRule
from paceline.ops.context import keys_values
from paceline.ops.reference.fused import wide

if TYPE_CHECKING:
    from paceline.draft.base import TargetInfo
    from paceline.ops.packed import PackedWeight

__all__ = ["ContextPath", "DFlashConfig", "DFlashLayer", "DFlashNet", "KeysValues", "block_tokens"]

ContextPath: TypeAlias = Literal["auto", "token", "layer", "stacked"]
KeysValues: TypeAlias = tuple[Tensor, Tensor]  # keys, values: [T, Hkv, D]

_STACKED_BYTES = 64 << 20  # most bytes that all layers' keys and values take before they are cached


_LAYER = "layers.{i}"
_QKV = tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv")


def _rule(target: str, *sources: str, kind: str = "weight") -> WeightRule:
    return WeightRule(
        target=f"{target}.{kind}",
        sources=tuple(f"{source}.{kind}" for source in sources),
        join=Concat() if len(sources) > 1 else Single(),
    )


class DFlashNet(nn.Module):
    """The drafter's parameters, and the two things that are computed with them.

    Embedding and head are the target's: borrowed, never among the parameters. The rotary table is
    as long as the target's context and one block more, whatever the checkpoint was made for.

    Args:
        config: shape and layout.
        target: the target's facts, embedding and head.
        dtype: of the parameters; default: the target's.
        device: where they live; default: the target's. "meta" until a checkpoint is loaded.
    """

    # z-lab's names. The table is read forwards to load and backwards to save.
    WEIGHTS: ClassVar[tuple[WeightRule, ...]] = (
        _rule("fc", "fc"),
        _rule("hidden_norm", "hidden_norm"),
        _rule(f"{_LAYER}.attention_norm", f"{_LAYER}.input_layernorm"),
        _rule(f"{_LAYER}.attention.qkv", *_QKV),
        _rule(f"{_LAYER}.attention.qkv", *_QKV, kind="bias"),
        _rule(f"{_LAYER}.attention.q_norm", f"{_LAYER}.self_attn.q_norm"),
        _rule(f"{_LAYER}.attention.k_norm", f"{_LAYER}.self_attn.k_norm"),
        _rule(f"{_LAYER}.attention.out", f"{_LAYER}.self_attn.o_proj"),
        _rule(f"{_LAYER}.attention.out", f"{_LAYER}.self_attn.o_proj", kind="bias"),
        _rule(f"{_LAYER}.mlp_norm", f"{_LAYER}.post_attention_layernorm"),
        _rule(f"{_LAYER}.mlp.gate_up", f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
        _rule(f"{_LAYER}.mlp.down", f"{_LAYER}.mlp.down_proj"),
        _rule("norm", "norm"),
        *(
            rule
            for name in ("attention_conv", "mlp_conv")
            for rule in (
                WeightRule(
                    target=f"{_LAYER}.{name}.base_kernel",
                    sources=(f"{_LAYER}.{name}.base_kernel",),
                ),
                _rule(f"{_LAYER}.{name}.kernel_projection", f"{_LAYER}.{name}.kernel_projection"),
            )
        ),
        WeightRule(
            target="selector.predecessors", sources=("candidate_selector.predecessor_codebook",)
        ),
        WeightRule(
            target="selector.successors", sources=("candidate_selector.successor_codebook",)
        ),
        _rule("selector.hidden_projection", "candidate_selector.hidden_projection"),
    )

    selector: Selector | None
    IGNORED: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    lm_head: ClassVar[None] = None  # as of a tied model: the head is the target's

    def __init__(
        self,
        config: DFlashConfig,
        target: TargetInfo,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.target = target  # no module itself, so what it lends is not registered here
        self.dtype = target.dtype if dtype is None else dtype
        place = target.device if device is None else torch.device(device)
        size, eps = config.hidden_size, config.rms_norm_eps
        taps = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = Linear(taps, size, dtype=self.dtype, device=place)
        self.hidden_norm = RMSNorm(size, eps, dtype=self.dtype, device=place)
        self.layers = nn.ModuleList(
            DFlashLayer(config, index, dtype=self.dtype, device=place)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps, dtype=self.dtype, device=place)
        self.selector = None
        if config.selector is not None:
            self.selector = Selector(
                config.selector, config.vocab_size, size, dtype=self.dtype, device=place
            )
        self.rope = _long_rope(config, target.config.max_position)
        if place.type != "meta":
            self.rope.to(place)
        self._stacked: Tensor | PackedWeight | None = None

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(
            self, batch: ForwardBatch, attend: Attend, aux_layers: tuple[int, ...] = ()
        ) -> ForwardOutput:
            """See `forward`."""

    def forward(
        self, batch: ForwardBatch, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """The block pass: [newest token, MASK ...] of every row, flat.

        Args:
            batch: token ids and positions; context keys are `attend`'s business.
            attend: attention as an argument. It honours each layer's window and tail rule.
            aux_layers: must be empty; a drafter is not tapped.

        Returns:
            hidden [T, H] after the final norm, for `logits`.
        """
        assert not aux_layers, "a drafter is not tapped"
        x, residual = self.embed(batch.token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch.positions, self.rope, attend)
        assert residual is not None, "a network has layers"
        hidden, _ = self.norm.add(x, residual)
        return ForwardOutput(hidden=hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embedding, scaled as configured: ids [T] to [T, H]."""
        x = self.target.embed(token_ids).to(self.dtype)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def decoder(self) -> Decoder | str:
        """See `DraftNet`."""
        config, layers = self.config, self._each_layer()
        if config.conv is not None:
            return "the draft's layers have convolutions"
        return Decoder(
            embed=self.embed,
            layers=layers,
            norm=self.norm,
            cos_sin=self.rope.cos_sin,
            eps=config.rms_norm_eps,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head on `forward`'s hidden states: [M, H] to [M, V] float32 or wider."""
        return self.shaped(self.target.head(hidden.to(self.target.dtype)))

    def shaped(self, logits: Tensor) -> Tensor:
        """Multiplier and soft cap of the configuration on the head's logits, any shape."""
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def fused(self, features: Tensor) -> Tensor:
        """Tapped features [T, F] as the one input [T, H] of all layers' context keys."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def context(
        self, features: Tensor, positions: Tensor, path: ContextPath = "auto"
    ) -> list[KeysValues]:
        """Keys and values of final tokens, for every layer; any positions, in any order.

        The paths compute the same; they differ in speed and in how sums are ordered. "token", one
        token and layer at a time, is the definition; "layer" is one product per layer; "stacked" one
        product for all layers, with their norms and rotations together (needs `stack`). "auto"
        takes the stacked path where its result is small enough to stay in a cache, which is where
        the number of calls and of passes over the weights counts, and else goes by layer.

        Args:
            features: [T, F] tapped residual streams, in the order of `target_layer_ids`.
            positions: [T] int64.
            path: which implementation.

        Returns:
            L pairs of keys (normed and rotated) and values, [T, Hkv, D] each.
        """
        if path == "auto":
            path = "stacked" if self.stacks(features.shape[0]) else "layer"
        if path == "token":
            return self._by_token(features, positions)
        if path == "stacked":
            return self._stacked_context(features, positions)
        c = self.fused(features)
        return [self._layer_context(layer, c, positions) for layer in self._each_layer()]

    def stack(self, matrix: Tensor | PackedWeight | None = None) -> None:
        """Prepare the stacked path. To be called again if weights change.

        Args:
            matrix: all layers' key and value rows one after the other, [L * 2 * Hkv * D, H], plain or
                packed; default: a copy of the layers' own, which must be plain.
        """
        if matrix is None:
            matrix = torch.cat([self._kv_weight(layer).detach() for layer in self._each_layer()])
        self._stacked = matrix
        norms = [layer.attention.k_norm for layer in self._each_layer()]
        gains = [norm.weight.detach() for norm in norms if norm is not None]
        self.gains = torch.stack(gains).to(wide(self.dtype))  # [L, D]

    def stacks(self, num_tokens: int) -> bool:
        """Whether the stacked path is there, and the better one for so many tokens."""
        if self._stacked is None or torch.is_grad_enabled():
            return False  # the copy carries no gradients
        return num_tokens * self._stacked.shape[0] * self.dtype.itemsize <= _STACKED_BYTES

    def stacked(self, features: Tensor) -> Tensor:
        """All layers' keys and values before norms and rotation (needs `stack`).

        Args:
            features: [T, F] tapped residual streams.

        Returns:
            [T, L * 2 * Hkv * D]: of each layer keys, then values; for `ops.context`, with `gains` [L, D].
        """
        assert self._stacked is not None, "`stack` was not called"
        return ops.linear(self.fused(features), self._stacked, self._stacked_bias())

    # ------------------------------------------------------------------------------ context paths

    def _each_layer(self) -> list[DFlashLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]

    def _by_token(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """The definition."""
        rows: list[list[KeysValues]] = [[] for _ in self.layers]
        for t in range(features.shape[0]):
            c = self.fused(features[t : t + 1])
            for mine, layer in zip(rows, self._each_layer(), strict=True):
                mine.append(self._layer_context(layer, c, positions[t : t + 1]))
        shape = (0, self.config.num_kv_heads, self.config.head_dim)
        none = features.new_empty(shape, dtype=self.dtype)
        return [
            (torch.cat([none, *(k for k, _ in mine)]), torch.cat([none, *(v for _, v in mine)]))
            for mine in rows
        ]

    def _layer_context(self, layer: DFlashLayer, c: Tensor, positions: Tensor) -> KeysValues:
        attention = layer.attention
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        if isinstance(attention.qkv.weight, Tensor):
            bias = attention.qkv.bias
            rows = slice(attention.qkv.splits[0], None)
            both = ops.linear(c, self._kv_weight(layer), None if bias is None else bias[rows])
        else:  # a packed matrix is not cut; queries are computed and dropped
            both = attention.qkv(c)[:, attention.qkv.splits[0] :]
        k, v = both.view(c.shape[0], 2, heads, dim).unbind(1)
        assert attention.k_norm is not None, "DFlash norms its keys"
        return self._rotated(attention.k_norm(k), positions), v

    def _stacked_context(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        product, angles = self.stacked(features), self.rope.cos_sin
        heads, eps = self.config.num_kv_heads, self.config.rms_norm_eps
        k, v = keys_values(product, positions, angles, heads, self.gains, eps)
        return list(zip(k.unbind(1), v.unbind(1), strict=True))

    def _stacked_bias(self) -> Tensor | None:
        """All layers' key and value biases one after the other."""
        if not self.config.attention_bias:
            return None
        biases = [(a.qkv.bias, a.qkv.splits[0]) for a in (x.attention for x in self._each_layer())]
        return torch.cat([bias[queries:] for bias, queries in biases if bias is not None])

    def _rotated(self, k: Tensor, positions: Tensor) -> Tensor:
        """Keys alone, through the rotation of queries and keys."""
        return self.rope(k, k[:, :0], positions)[0]

    @staticmethod
    def _kv_weight(layer: DFlashLayer) -> Tensor:
        """A layer's key and value rows [2 * Hkv * D, H], a view."""
        qkv = layer.attention.qkv
        assert isinstance(qkv.weight, Tensor), "packed weights are not cut"
        return qkv.weight[qkv.splits[0] :]


def block_tokens(config: DFlashConfig, roots: Tensor) -> Tensor:
    """A block's token ids: roots [B] and masks, [B, b] int64."""
    masks = roots.new_full((roots.shape[0], config.block_size - 1), config.mask_token_id)
    return torch.cat((roots.unsqueeze(1), masks), dim=1)


def _long_rope(config: DFlashConfig, target_length: int) -> Rope:
    """Angles as the checkpoint defines them, for as many positions as the target has.

    Where the kind depends on a length and none is given, the checkpoint's own stands in, never that
    of the table.
    """
    original = config.rope.original_max_position or config.max_position
    rope = replace(config.rope, original_max_position=original)
    length = max(target_length, config.max_position) + config.block_size
    return Rope(rope, config.head_dim, length)
