"""An EAGLE-3 drafter in training: target features, chains unrolled as in serving, loss and predictions.

An anchor at place a is a token that serving would know and draft from: the root of a chain. Its entry 0
pairs the target's feature at place a - 1 with the token at a; step k pairs what step k - 1 gave with the
token at a + k, as the text has it, and predicts the token at a + k + 1 (training-time test; EAGLE-3, arXiv
2503.01840). Every chain of a step is computed at once; `unroll.py` says what they see.

The target is frozen and reads the packed rows again in every step: features are never stored. What learns
is `Eagle3Net` itself, its head of the draft vocabulary too.

Letters: S rows, C tokens of a row, N anchors of a row, K steps of a chain, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor, nn

from paceline.draft.eagle3_config import Eagle3Config, default_taps
from paceline.ops.reference.fused import wide
from paceline.train.attend import PackedCausal, packed_pass
from paceline.train.losses import RowWeights, best_tokens
from paceline.train.soft_loss import Fused, aims, scored, slopes, soft_loss
from paceline.train.target import check_taps, choose_ops, head_matrix
from paceline.train.unroll import Chains

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig
    from paceline.draft.eagle3_net import Eagle3Net
    from paceline.layers.linear import Matrix
    from paceline.models.base import CausalLM
    from paceline.train.eagle3_settings import Eagle3Settings
    from paceline.train.packing import Batch

_INIT_STD = 0.02
_Read: TypeAlias = Callable[["Batch"], tuple[Tensor, Tensor]]


def new_config(settings: Eagle3Settings, target: ModelConfig) -> Eagle3Config:
    """The shape of a new drafter: one layer like the target's own.

    Raises:
        ConfigError: a tapped layer does not exist.
    """
    taps = settings.taps or default_taps(target.num_layers)
    check_taps(taps, target)
    low, middle, high = taps
    return Eagle3Config(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=settings.mlp_size or target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(settings.draft_vocab, target.vocab_size),
        aux_layers=(low, middle, high),
        max_position=target.max_position,
        rope=target.rope,
        rms_norm_eps=target.rms_norm_eps,
        fc_norm=settings.form == "eagle3.1",
        norm_output=settings.form == "eagle3.1",
    )


@torch.no_grad()
def initialise(net: Eagle3Net, target: CausalLM, seed: int) -> None:
    """First weights: normal matrices, smaller where a branch writes to the stream; norms are 1.

    Where the widths agree, the head starts from the target's rows of the draft vocabulary, and the norm
    before it from the target's, so that rare tokens start with what the target knows of them; but both
    at the usual size, since a head at the target's own would be very sure of wrong tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        std = _INIT_STD
        if name in ("attention.out.weight", "mlp.down.weight"):
            std /= 2**0.5
        if name == "fc.weight":
            std = parameter.shape[1] ** -0.5
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std
        parameter.copy_(drawn)
    head = head_matrix(target)
    if head.shape[1] == net.config.hidden_size:
        gain = target.norm.weight.to(wide(net.dtype))
        net.norm.weight.copy_(gain / gain.square().mean().sqrt())
        rows = head[net.d2t].to(gain.dtype)
        plain(net.lm_head).copy_(rows * (_INIT_STD / rows.square().mean().sqrt()))


def plain(matrix: Matrix) -> Tensor:
    """A matrix's weight, which training never packs."""
    assert isinstance(matrix.weight, Tensor), "training has plain weights"
    return matrix.weight


class Eagle3Task:
    """Loss and predictions of a drafter on packed batches.

    Args:
        target: frozen, with plain weights.
        net: the drafter; its parameters get gradients.
        num_steps: K.
        weigh: how a chain's steps are weighed.
        compiled: run the target and the loss through torch.compile. Not the chains, which Triton 3.6
            cannot compile (inductor's kernel ends in "PassManager::run failed").
    """

    def __init__(
        self,
        target: CausalLM,
        net: Eagle3Net,
        num_steps: int,
        weigh: RowWeights,
        *,
        compiled: bool = False,
    ) -> None:
        self.target, self.net = target, net
        self.num_steps = num_steps
        self._weigh = weigh
        self._head = head_matrix(target)
        self._rows = torch.full((target.config.vocab_size,), -1, device=target.device)
        self._rows[net.d2t] = torch.arange(net.config.draft_vocab_size, device=target.device)
        net.requires_grad_(True)
        self._read: _Read = self._run_target
        self._fused: tuple[Fused, Fused] | None = None
        if compiled:
            choose_ops(target)
            # Shapes never change, so nothing is compiled twice.
            self._read = cast("_Read", torch.compile(self._run_target, dynamic=False))
            self._fused = (
                cast("Fused", torch.compile(scored)),  # the last chunk is a shorter one
                cast("Fused", torch.compile(slopes)),
            )

    @torch.no_grad()
    def read(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The target's tapped streams [S * C, 3 * Ht] and output [S * C, Ht]. No gradients."""
        return self._read(batch)

    def unroll(self, batch: Batch, features: Tensor) -> Tensor:
        """The drafter's output after its final norm for every step of every chain, [S * N, K, H]."""
        net, (rows, size) = self.net, batch.token_ids.shape
        fused = net.project(features)
        after = batch.token_ids.roll(-1, 1).view(-1)  # a sequence's last entry: no chain sees it
        context = net.context(net.embed(after), fused, batch.positions.view(-1))
        places = (batch.anchors - 1).clamp(min=0)  # a row's unused anchors say 0
        attend = Chains(context, batch.docs, places)
        first = torch.arange(rows, device=places.device).unsqueeze(1) * size
        feature = fused.index_select(0, (places + first).view(-1))
        position = batch.positions.gather(1, places).view(-1)
        token = batch.token_ids.gather(1, batch.anchors).view(-1)
        said = []
        for step in range(self.num_steps):
            if step:
                token = batch.targets[:, :, step - 1].reshape(-1).clamp(min=0)
            out = net.layer(net.embed(token), feature, position + step, attend)
            said.append(net.norm(out))
            feature = net.fed_back(out)
        hidden = torch.stack(said, dim=1)
        scale = net.config.logit_scale
        return hidden if scale == 1.0 else hidden * scale

    def loss(self, batch: Batch) -> Tensor:
        """Weighted soft cross-entropy, a scalar with gradients."""
        features, output = self.read(batch)
        rows, size = batch.token_ids.shape
        first = torch.arange(rows, device=output.device).view(-1, 1, 1) * size
        step = torch.arange(self.num_steps, device=output.device)
        places = (batch.anchors.unsqueeze(-1) + step).clamp(max=size - 1) + first
        return soft_loss(
            self.unroll(batch, features),
            plain(self.net.lm_head),
            aims(output, self._head, self.net.d2t, self._rows),
            places.flatten(0, 1),
            batch.targets.flatten(0, 1) >= 0,
            self._weigh,
            fused=self._fused,
        )

    @torch.no_grad()
    def matches(self, batch: Batch) -> Tensor:
        """[S, N] int64: how many leading drafts of each chain are what the text goes on with.

        Steps are fed the text's tokens. Up to a chain's first mismatch these are its own drafts, and
        what comes after that is not counted.
        """
        hidden = self.unroll(batch, self.read(batch)[0])
        best = self.net.d2t[best_tokens(hidden, plain(self.net.lm_head))]
        best = best.view_as(batch.targets)
        return (best == batch.targets).to(torch.int64).cumprod(-1).sum(-1)

    @torch.no_grad()
    def first_drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each chain's first draft and what the target finds likeliest there, both [S, N] int64.

        The first is a row of the draft head, the second a token.
        """
        features, output = self.read(batch)
        hidden = self.unroll(batch, features)[:, 0]
        said = best_tokens(hidden, plain(self.net.lm_head))
        rows, size = batch.token_ids.shape
        first = torch.arange(rows, device=output.device).unsqueeze(1) * size
        wanted = best_tokens(output[(batch.anchors + first).view(-1)], self._head)
        return said.view_as(batch.anchors), wanted.view_as(batch.anchors)

    def _run_target(self, batch: Batch) -> tuple[Tensor, Tensor]:
        attend = PackedCausal(batch.docs, batch.positions)
        out = self.target(packed_pass(batch), attend, self.net.config.aux_layers)
        assert out.aux is not None, "a drafter has taps"
        return out.aux, out.hidden
