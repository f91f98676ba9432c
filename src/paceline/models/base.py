"""CausalLM: embed, run the layers, tap residual streams, norm; logits on request.

A network is a function of (weights, batch, attend): it knows no cache, no sampling and no schedule.
`DecoderLayer` and `DECODER_WEIGHTS` are the pre-norm block that most models share; a model's own file
says what differs.

Letters: T tokens, H hidden size, M picked positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from paceline.core.batch import Attend, ForwardBatch, ForwardOutput
from paceline.core.errors import ConfigError
from paceline.layers.attention import Attention
from paceline.layers.decoder import Decoder
from paceline.layers.embedding import Embedding, Head
from paceline.layers.linear import Matrix
from paceline.layers.mlp import MLP
from paceline.layers.norm import RMSNorm
from paceline.layers.rope import Rope
from paceline.models.weights import Concat, Single, WeightRule

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig
    from paceline.models.hf import HFConfig

_QKV = ("q_proj", "k_proj", "v_proj")
_LAYER = "model.layers.{i}"


def _linear(target: str, *sources: str) -> tuple[WeightRule, ...]:
    """Rules for the weight and, where there is one, the bias of a projection."""
    return tuple(
        WeightRule(
            target=f"layers.{{i}}.{target}.{kind}",
            sources=tuple(f"{_LAYER}.{source}.{kind}" for source in sources),
            join=Concat() if len(sources) > 1 else Single(),
        )
        for kind in ("weight", "bias")
    )


def _norm(target: str, source: str) -> WeightRule:
    return WeightRule(
        target=f"layers.{{i}}.{target}.weight", sources=(f"{_LAYER}.{source}.weight",)
    )


# The Hugging Face names of a pre-norm decoder with grouped-query attention and a gated MLP.
DECODER_WEIGHTS: tuple[WeightRule, ...] = (
    WeightRule(target="embed.weight", sources=("model.embed_tokens.weight",)),
    _norm("attention_norm", "input_layernorm"),
    *_linear("attention.qkv", *(f"self_attn.{name}" for name in _QKV)),
    *_linear("attention.out", "self_attn.o_proj"),
    _norm("mlp_norm", "post_attention_layernorm"),
    *_linear("mlp.gate_up", "mlp.gate_proj", "mlp.up_proj"),
    *_linear("mlp.down", "mlp.down_proj"),
    WeightRule(target="norm.weight", sources=("model.norm.weight",)),
    WeightRule(target="lm_head.weight", sources=("lm_head.weight",)),
)
QK_NORM_WEIGHTS: tuple[WeightRule, ...] = (
    _norm("attention.q_norm", "self_attn.q_norm"),
    _norm("attention.k_norm", "self_attn.k_norm"),
)


class DecoderLayer(nn.Module):
    """Pre-norm block: x += attention(norm(x)); x += mlp(norm(x)).

    The residual addition is fused with the norm that follows it, so a layer takes and returns the
    pair (what the last block adds, the stream before it).

    Args:
        config: sizes and options.
        index: the layer's index in its KV pool.
        dtype: of the parameters.
        device: where they live.
    """

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(config, index, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(
            self, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Rope, attend: Attend
        ) -> tuple[Tensor, Tensor]:
            """See `forward`."""

    def forward(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, rope: Rope, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return (what the MLP adds [T, H], the stream before it [T, H]).

        Args:
            x: [T, H], what the last block adds, or the embeddings.
            residual: [T, H], the stream before it; None in the first layer.
            positions: [T] int64.
            rope: the model's rotary embedding.
            attend: attention as an argument.
        """
        if residual is None:
            x, residual = self.attention_norm(x), x
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, positions, rope, attend)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class CausalLM(nn.Module):
    """A decoder-only language model.

    Args:
        config: sizes and options.
        dtype: of activations and plain parameters.
        device: where parameters live; "meta" until a checkpoint is loaded.
    """

    WEIGHTS: ClassVar[tuple[WeightRule, ...]]
    # Patterns of checkpoint tensors that carry nothing: tables that follow from the configuration.
    IGNORED: ClassVar[tuple[str, ...]] = (r"\.rotary_emb\.inv_freq$",)

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        vocab, size = config.vocab_size, config.hidden_size
        self.embed = Embedding(vocab, size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype=dtype, device=device)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            None if config.tie_embeddings else Head(vocab, size, dtype=dtype, device=device)
        )
        self.rope = Rope(config.rope, config.head_dim, config.max_position)
        if torch.device(device).type != "meta":
            self.rope.to(device)

    @classmethod
    def from_hf(cls, raw: HFConfig) -> ModelConfig:
        """Read the architecture's config.json; every model says how.

        Raises:
            ModelError: it is malformed, or asks for what is not supported.
        """
        raise NotImplementedError

    if TYPE_CHECKING:  # nn.Module's own returns Any

        def __call__(
            self, batch: ForwardBatch, attend: Attend, aux_layers: tuple[int, ...] = ()
        ) -> ForwardOutput:
            """See `forward`."""

    def forward(
        self, batch: ForwardBatch, attend: Attend, aux_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """One pass over T tokens.

        Args:
            batch: what to compute.
            attend: attention as an argument.
            aux_layers: layers whose output (the residual stream after them, before any norm) is
                tapped; for the last layer that is the stream before the final norm.

        Returns:
            hidden [T, H] after the final norm; aux [T, n * H] in the order of `aux_layers`, or None.

        Raises:
            ConfigError: there is no such layer.
        """
        self._check_taps(aux_layers)
        taps: dict[int, Tensor] = {}
        x, residual = self.embed(batch.token_ids), None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch.positions, self.rope, attend)
            if index in aux_layers:
                taps[index] = x + residual
        assert residual is not None, "a model has layers"
        hidden, _ = self.norm.add(x, residual)
        aux = torch.cat([taps[index] for index in aux_layers], dim=-1) if aux_layers else None
        return ForwardOutput(hidden=hidden, aux=aux)

    def decoder(self) -> Decoder | str:
        """The network's parts for a pass in one call; or, as a clause, why its pass is another."""
        name, config = type(self).__name__, self.config
        if type(self).forward is not CausalLM.forward:
            return f"{name} has a pass of its own"
        if any(type(layer) is not DecoderLayer for layer in self.layers):
            return f"{name} has layers of its own"
        return Decoder(
            embed=self.embed,
            layers=[layer for layer in self.layers if isinstance(layer, DecoderLayer)],
            norm=self.norm,
            cos_sin=self.rope.cos_sin,
            eps=config.rms_norm_eps,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )

    def head(self, hidden: Tensor) -> Tensor:
        """Logits: [M, H] (after the final norm) to [M, V] float32, or wider if hidden is."""
        return self.embed.logits(hidden) if self.lm_head is None else self.lm_head(hidden)

    @property
    def device(self) -> torch.device:
        """Where the network lives."""
        return self.norm.weight.device

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, packed weights and tables; a tied table counts once."""
        plain = sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))
        matrices = [module for module in self.modules() if isinstance(module, Matrix)]
        return plain + sum(m.nbytes for m in matrices if not isinstance(m.weight, Tensor))

    def _check_taps(self, aux_layers: tuple[int, ...]) -> None:
        count = self.config.num_layers
        wrong = [index for index in aux_layers if not 0 <= index < count]
        if wrong:
            msg = (
                f"tapped layers {wrong} do not exist; the model has layers 0 to {count - 1}. "
                "Use a drafter that was made for this model."
            )
            raise ConfigError(msg)
