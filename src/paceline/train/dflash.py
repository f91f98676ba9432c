"""A DFlash drafter in training: target features, blocks from random anchors, loss and predictions.

Features are never stored: the target reads the packed rows again in every step, through the code that
serves (`CausalLM.forward` with its taps). Target, embedding and head are frozen; what learns is `DFlashNet`
itself.

Letters: S rows, C tokens of a row, N anchors of a row, b block size, R predicted rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.draft.dflash_config import DFlashConfig, default_taps
from paceline.draft.dflash_net import DFlashNet
from paceline.train.attend import Blocks, PackedCausal, block_pass, packed_pass
from paceline.train.losses import RowWeights, best_tokens, block_loss
from paceline.train.target import check_taps, choose_ops, head_matrix

if TYPE_CHECKING:
    from paceline.core.config import ModelConfig
    from paceline.models.base import CausalLM
    from paceline.train.dflash_settings import DFlashSettings
    from paceline.train.packing import Batch
    from paceline.train.prepare import ChatTokenizer

_DEFAULT_NUM_TAPS = 5  # the paper's; more than that won little there
_INIT_STD = 0.02
_LEAST_EMBEDDING = 1e-3  # of a mask's largest number; one that is smaller says nothing


def new_config(settings: DFlashSettings, target: ModelConfig, mask_token: int) -> DFlashConfig:
    """The shape of a new drafter: draft layers like the target's own, all of them bidirectional.

    Raises:
        ConfigError: a tapped layer does not exist.
    """
    taps = settings.taps or default_taps(target.num_layers, _DEFAULT_NUM_TAPS)
    check_taps(taps, target)
    return DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=settings.mlp_size or target.intermediate_size,
        num_layers=settings.layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        max_position=target.max_position,
        block_size=settings.block,
        mask_token_id=mask_token,
        target_layer_ids=tuple(taps),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        windows=(None,) * settings.layers,
        causal=(False,) * settings.layers,
        rope=target.rope,
        rms_norm_eps=target.rms_norm_eps,
    )


def choose_mask_token(tokenizer: ChatTokenizer, target: CausalLM) -> int:
    """A token that text does not hold: the last special one that ends nothing and no chat has.

    Its embedding must be trained, or at least not zero: every masked row of a block starts from it.

    Raises:
        ConfigError: there is none.
    """
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hello."}])
    taken = {*chat, *tokenizer.eos_token_ids, target.config.bos_token_id}
    size = target.config.vocab_size
    for token in sorted(tokenizer.special_ids - taken, reverse=True):
        if token < size:
            row = target.embed(torch.tensor([token], device=target.device))
            if float(row.abs().max()) > _LEAST_EMBEDDING:
                return token
    msg = (
        "the tokenizer has no special token to spare for the mask (one that no chat uses and whose "
        "embedding is not zero); name the id of a token that is rare in text, with --mask-token"
    )
    raise ConfigError(msg)


def initialise(net: DFlashNet, seed: int) -> None:
    """First weights: normal matrices, smaller where a layer writes to the stream; norms are 1.

    The residual branches are scaled as in GPT-2 (by the number of branches), the fusion of taps by its
    number of inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    branches = 2 * net.config.num_layers
    for name, parameter in net.named_parameters():
        if parameter.dim() < 2:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        std = _INIT_STD
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            std /= branches**0.5
        if name == "fc.weight":
            std = parameter.shape[1] ** -0.5
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std
        with torch.no_grad():
            parameter.copy_(drawn)


class DFlashTask:
    """Loss and predictions of a drafter on packed batches.

    Args:
        target: frozen, with plain weights.
        net: the drafter; its parameters get gradients.
        weigh: how a block's rows are weighed.
        compiled: run both networks through torch.compile.

    Raises:
        ConfigError: the drafter's head cannot be trained here.
    """

    def __init__(
        self, target: CausalLM, net: DFlashNet, weigh: RowWeights, *, compiled: bool = False
    ) -> None:
        self.target, self.net = target, net
        self._weigh = weigh
        self._head = head_matrix(target)
        lacking = [
            what
            for what, there in (
                ("caps its logits", net.config.logit_softcap is not None),
                ("has a candidate selector (DFlash 2)", net.config.selector is not None),
            )
            if there
        ]
        if lacking:
            msg = (
                f"the drafter {' and '.join(lacking)}, which training does not support; possible "
                "are DFlash drafters without; train a new one"
            )
            raise ConfigError(msg)
        net.requires_grad_(True)
        self._features: Callable[[Batch], Tensor] = self._run_target
        self._hidden: Callable[[Batch, Tensor], Tensor] = self._run_net
        if compiled:
            choose_ops(target)
            # Shapes never change, so nothing is compiled twice.
            self._features = cast(
                "Callable[[Batch], Tensor]", torch.compile(self._run_target, dynamic=False)
            )
            self._hidden = cast(
                "Callable[[Batch, Tensor], Tensor]", torch.compile(self._run_net, dynamic=False)
            )

    @property
    def num_targets(self) -> int:
        """R."""
        return self.net.config.num_proposals

    @torch.no_grad()
    def features(self, batch: Batch) -> Tensor:
        """Tapped streams of packed rows, [S * C, F]. No gradient."""
        return self._features(batch)

    def hidden(self, batch: Batch) -> Tensor:
        """The drafter's output for the predicted rows of every block, [S * N, R, H]."""
        return self._hidden(batch, self.features(batch))

    def loss(self, batch: Batch) -> Tensor:
        """Weighted cross-entropy, a scalar with gradients."""
        targets = batch.targets.flatten(0, 1)
        return block_loss(self.hidden(batch), self._head, targets, self._weigh)

    def matches(self, batch: Batch) -> Tensor:
        """[S, N] int64: how many leading drafts of each block are what the text goes on with."""
        # Gradients stay on: the compiled network is then the one of the training step.
        hidden = self.hidden(batch).detach()
        best = best_tokens(hidden, self._head).view_as(batch.targets)
        return (best == batch.targets).to(torch.int64).cumprod(-1).sum(-1)

    def _run_target(self, batch: Batch) -> Tensor:
        attend = PackedCausal(batch.docs, batch.positions)
        out = self.target(packed_pass(batch), attend, self.net.config.target_layer_ids)
        assert out.aux is not None, "a drafter has taps"
        return out.aux

    def _run_net(self, batch: Batch, features: Tensor) -> Tensor:
        config = self.net.config
        attend = Blocks(
            context=self.net.context(features, batch.positions.view(-1), "layer"),
            docs=batch.docs,
            positions=batch.positions,
            anchors=batch.anchors,
            block=config.block_size,
        )
        out = self.net(block_pass(batch, config.block_size, config.mask_token_id), attend)
        rows = out.hidden.view(-1, config.block_size, config.hidden_size)
        kept = rows[:, config.block_size - config.num_proposals :]
        return kept if config.logit_scale == 1.0 else kept * config.logit_scale
