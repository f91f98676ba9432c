"""EAGLE-3's network: one layer that predicts a token from the token before it and a feature.

EAGLE-3 (Li, Wei, Zhang, Zhang; arXiv 2503.01840). The feature of a position is the target's residual
stream at three layers, projected to one vector (`project`); of a position that the target has not seen,
it is the layer's own output one position before (`fed_back`).

    entry i   =  token i + 1  and  feature i,  rotated by position i
    layer     :  n = hidden_norm(feature);  x = [embed_norm(embedding) ; n]          2H
                 stream = feature (or n: norm_before_residual) + attention(x)        q, k, v from 2H
                 output = stream + mlp(mlp_norm(stream))
    logits    =  lm_head(norm(output)), of token i + 2, over the draft vocabulary
    fed back  =  output, or norm(output) (norm_output): the feature of entry i + 1
    project   :  fc([low ; mid ; high]), after one norm over all (norm_before_fc) or one each (fc_norm)

A key or value depends on its own entry alone, since there is one layer: on the target's features at
position i and on token i + 1. So it may be cached, shared and evicted with the target's own, once the
token after it is known, and a cache is brought up to date without attention or MLP (`context`).

Row v of the head is the target's token `d2t[v]`. Files store `d2t[v] - v`; here it is the id itself.

The same class serves and trains: serving passes a paged `Attend`, training one of its own.

Not here: configurations (`eagle3_config.py`), files (`eagle3_checkpoint.py`), proposals (`eagle3.py`).

Letters: T tokens, M positions, Ht target hidden size, H hidden size, Hq/Hkv heads, D head size,
V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from paceline.core.batch import Attend, ForwardBatch, ForwardOutput
from paceline.draft.eagle3_config import NUM_TAPS, Eagle3Config
from paceline.layers.attention import Attention
from paceline.layers.embedding import Embedding, Head
from paceline.layers.linear import Linear
from paceline.layers.mlp import MLP
from paceline.layers.norm import RMSNorm
from paceline.layers.rope import Rope
from paceline.models.weights import Concat, Single, WeightRule

if TYPE_CHECKING:
    from paceline.draft.base import TargetInfo

__all__ = ["Eagle3Config", "Eagle3Net", "weight_rules"]

_SERVED_BEYOND = 256  # positions past the target's context: the deepest draft


def weight_rules(layer: str) -> tuple[WeightRule, ...]:
    """The table of a layout whose one layer is called `layer`; read both ways."""

    def rule(target: str, *sources: str, kind: str = "weight") -> WeightRule:
        return WeightRule(
            target=f"{target}.{kind}",
            sources=tuple(f"{source}.{kind}" for source in sources),
            join=Concat() if len(sources) > 1 else Single(),
        )

    qkv = tuple(f"{layer}.self_attn.{part}_proj" for part in "qkv")
    return (
        rule("embedding", "embed_tokens"),
        rule("input_norm", "input_norm"),
        *(rule(f"fc_norm.{i}", f"fc_norm.{i}") for i in range(NUM_TAPS)),
        rule("fc", "fc"),
        rule("embed_norm", f"{layer}.input_layernorm"),
        rule("hidden_norm", f"{layer}.hidden_norm"),
        rule("attention.qkv", *qkv),
        rule("attention.qkv", *qkv, kind="bias"),
        rule("attention.q_norm", f"{layer}.self_attn.q_norm"),
        rule("attention.k_norm", f"{layer}.self_attn.k_norm"),
        rule("attention.out", f"{layer}.self_attn.o_proj"),
        rule("attention.out", f"{layer}.self_attn.o_proj", kind="bias"),
        rule("mlp_norm", f"{layer}.post_attention_layernorm"),
        rule("mlp.gate_up", f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"),
        rule("mlp.down", f"{layer}.mlp.down_proj"),
        rule("norm", "norm"),
        rule("lm_head", "lm_head"),
    )


class Eagle3Net(nn.Module):
    """The drafter's parameters, and what is computed with them.

    The embedding is the target's unless the configuration says otherwise: borrowed, never among the
    parameters. The rotary table is as long as the target's context, whatever the checkpoint was made
    for. The maps start as the identity on the first Vd tokens; `set_vocabulary` exchanges them.

    Args:
        config: shape and layout.
        target: the target's facts and embedding; None where only the methods that take embeddings
            are used.
        dtype: of the parameters; default: the target's, or float32.
        device: where they live; default: the target's, or the CPU. "meta" until a checkpoint is
            loaded.

    Attributes:
        d2t: [Vd] int64, the target's id of each draft token, increasing.
        t2d: [V] bool, which of the target's tokens can be drafted.
    """

    # SafeAILab's and SpecForge's names. The table is read forwards to load and backwards to save.
    WEIGHTS: ClassVar[tuple[WeightRule, ...]] = weight_rules("midlayer")
    # Tables, what speculators trains with, a copy of the target's embedding, and the vocabulary's
    # maps, which are no parameters.
    IGNORED: ClassVar[tuple[str, ...]] = (
        r"rotary_emb\.inv_freq$",
        r"^verifier_(lm_head|norm)\.",
        r"^embed_tokens\.weight$",
        r"^(d2t|t2d)$",
    )

    d2t: Tensor
    t2d: Tensor
    embedding: Embedding | None
    input_norm: RMSNorm | None
    fc_norm: nn.ModuleList | None

    def __init__(
        self,
        config: Eagle3Config,
        target: TargetInfo | None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.target = target  # no module itself, so what it lends is not registered here
        if dtype is None:
            dtype = torch.float32 if target is None else target.dtype
        if device is None:
            device = "cpu" if target is None else target.device
        self.dtype = dtype
        place = torch.device(device)
        size, taps, layer = config.hidden_size, config.target_hidden_size, config.layer_config()

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, config.rms_norm_eps, dtype=dtype, device=place)

        self.embedding = None
        if config.own_embedding:
            self.embedding = Embedding(config.vocab_size, size, dtype=dtype, device=place)
        self.input_norm = norm(NUM_TAPS * taps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(taps) for _ in range(NUM_TAPS))
        self.fc = Linear(NUM_TAPS * taps, size, dtype=dtype, device=place)
        self.embed_norm = norm(size)
        self.hidden_norm = norm(size)
        self.attention = Attention(layer, 0, dtype=dtype, device=place)
        self.attention.qkv = Linear(  # the one thing that differs from other attention: 2H in
            2 * size, *self.attention.qkv.splits, bias=config.qkv_bias, dtype=dtype, device=place
        )
        self.mlp_norm = norm(size)
        self.mlp = MLP(layer, dtype=dtype, device=place)
        self.norm = norm(size)
        self.lm_head = Head(config.draft_vocab_size, size, dtype=dtype, device=place)
        reach = config.max_position
        if target is not None:
            reach = max(reach, target.config.max_position)
        self.rope = _long_rope(config, reach + _SERVED_BEYOND)
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        if place.type != "meta":
            self.place_tables(place)

    def place_tables(self, device: torch.device) -> None:
        """Put the rotary table and the vocabulary's maps on a device; they are made on the CPU."""
        self.rope.to(device)
        self.d2t, self.t2d = self.d2t.to(device), self.t2d.to(device)

    def set_vocabulary(self, d2t: Tensor) -> None:
        """Let row v of the head stand for the target's token d2t[v].

        Args:
            d2t: [Vd] int64, strictly increasing ids below V.
        """
        assert d2t.shape == self.d2t.shape, "an id for each row of the head"
        self.d2t = d2t.to(device=self.d2t.device, dtype=torch.int64)
        self.t2d = torch.zeros_like(self.t2d).index_fill(0, self.d2t, value=True)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(
            self, batch: ForwardBatch, attend: Attend, aux_layers: tuple[int, ...] = ()
        ) -> ForwardOutput:
            """See `forward`."""

    def decoder(self) -> str:
        """See `DraftNet`: there is none."""
        return "the draft's layer takes two inputs"

    def forward(
        self, batch: ForwardBatch, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """One pass over T entries: `layer` on the batch's tokens and features.

        Args:
            batch: `token_ids` [T], `features` [T, H] (projected or fed back), `positions` [T].
            attend: attention as an argument.
            aux_layers: must be empty; a drafter is not tapped.

        Returns:
            hidden [T, H], *before* the final norm: for `logits` and `fed_back`.
        """
        assert not aux_layers, "a drafter is not tapped"
        assert batch.features is not None, "an entry has a feature"
        embeds = self.embed(batch.token_ids)
        return ForwardOutput(hidden=self.layer(embeds, batch.features, batch.positions, attend))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., H] of the target's token ids [...] int64, the own table's or the target's."""
        if self.embedding is not None:
            return self.embedding(token_ids)
        assert self.target is not None, "the embedding is the target's, and there is none"
        return self.target.embed(token_ids).to(self.dtype)

    def project(self, aux: Tensor) -> Tensor:
        """Features [T, H] of tapped residual streams [T, 3 * Ht], in the order of `aux_layers`."""
        x = aux.to(self.dtype)
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norm is not None:
            parts = x.chunk(NUM_TAPS, dim=-1)
            x = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        return self.fc(x)

    def layer(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The output residual stream [T, H] of T entries.

        Args:
            embeds: [T, H], `embed` of token i + 1.
            hidden: [T, H], the feature of position i: `project`'s, or `fed_back` of the entry before.
            positions: [T] int64, i. Rotations are relative: i + 1 everywhere gives the same.
            attend: attention as an argument; this network has the one site, index 0.
        """
        doubled, stream = self._input(embeds, hidden)
        mixed = self.attention(doubled, positions, self.rope, attend)
        x, stream = self.mlp_norm.add(mixed, stream)
        return stream + self.mlp(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of `layer`'s output: [M, H] to [M, Vd] float32 or wider, of the token after each entry's."""
        logits = self.lm_head(self.norm(hidden))
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def fed_back(self, hidden: Tensor) -> Tensor:
        """Of `layer`'s output [..., H]: the feature of the next entry, [..., H]."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def context(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values [T, Hkv, D] of T entries: what `layer` would cache of them.

        Arguments as for `layer`.
        """
        doubled, _ = self._input(embeds, hidden)
        qkv = self.attention.qkv
        heads = (doubled.shape[0], -1, self.config.head_dim)
        _, k, v = (part.view(heads) for part in torch.split(qkv(doubled), [*qkv.splits], dim=-1))
        if self.attention.k_norm is not None:
            k = self.attention.k_norm(k)
        return self.rope(k, k[:, :0], positions)[0], v

    def _input(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's doubled input [T, 2H], and the residual stream before it [T, H]."""
        normed = self.hidden_norm(hidden)
        stream = normed if self.config.norm_before_residual else hidden
        return torch.cat((self.embed_norm(embeds), normed), dim=-1), stream


def _long_rope(config: Eagle3Config, length: int) -> Rope:
    """Angles as the checkpoint defines them, for `length` positions.

    Where the kind depends on a length and none is given, the checkpoint's own stands in, never that
    of the table.
    """
    original = config.rope.original_max_position or config.max_position
    return Rope(replace(config.rope, original_max_position=original), config.head_dim, length)
