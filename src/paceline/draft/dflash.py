"""DFlash: a whole block of draft tokens from one pass (Chen, Liang, Liu; arXiv 2602.06036).

`observe` turns the target's tapped features of every token that became final into draft keys and
values, at the target's own slot numbers; so prefix hits, shared pages and chunked prefill need nothing
more. `propose` runs [newest token, MASK, MASK, ...] over them once and reads a distribution off every
row; the block's own keys are scratch, overwritten by the next step.

`DFlashBlock` does both for every drafter that builds on the block (`ddtree.py`); `DFlashDrafter`
proposes the chain of best candidates.

No value is read by the host on a GPU.

Letters: B rows, b block size, P positions proposed, T tokens, F width of the features, H hidden size,
V vocabulary, C candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core import tree
from paceline.draft import checkpoint_folder
from paceline.draft.base import DrafterSpec
from paceline.draft.candidates import SAMPLED, Calibration, Candidates, Gains, batches, rank
from paceline.draft.dflash_checkpoint import load
from paceline.draft.dflash_net import DFlashNet
from paceline.ops import drafts

if TYPE_CHECKING:
    from paceline.core.config import DraftConfig
    from paceline.core.tree import DraftTree
    from paceline.draft.base import Commit, DraftRuntime, TargetInfo
    from paceline.draft.dflash2 import Selector

SOURCE = 4  # in `DraftTree.sources`: 1 and 2 are the row's own text and past outputs
_GREEDY = 16  # candidates of a greedy row, at least: the proposed ones, and some to learn from


class DFlashBlock:
    """A DFlash network at work: keeps its cache, and turns a block into candidates.

    Args:
        net: with its weights.
        most: proposed positions at most.
    """

    def __init__(self, net: DFlashNet, most: int) -> None:
        self.net = net
        self.num_positions = min(net.config.num_proposals, most)
        self._first = 0 if net.config.sample_from_anchor else 1  # block row of the first position
        device = net.target.device
        self._calibration = Calibration(self.num_positions, device)
        block = net.config.block_size
        masks = (1, block - 1)
        self._masks = torch.full(masks, net.config.mask_token_id, dtype=torch.int64, device=device)
        self._mask = tree.prefix_bits(torch.full((block,), block, device=device), block)
        self._asked: tuple[Tensor, Tensor, Candidates] | None = None  # rows, temperature, answer

    def spec(self, name: str, max_nodes: int) -> DrafterSpec:
        """Facts of a drafter that proposes up to `max_nodes` nodes, root included."""
        config = self.net.config
        return DrafterSpec(
            name=name,
            max_nodes=max_nodes,
            max_depth=self.num_positions,
            on_host=False,
            sources={SOURCE: name},
            source=SOURCE,
            aux_layers=config.target_layer_ids,
            kv=config.kv,
            scratch=config.block_size,
        )

    def attach(self, runtime: DraftRuntime) -> None:
        """See `Drafter`."""
        self._runtime = runtime

    @torch.inference_mode()
    def observe(self, commit: Commit) -> None:
        """Cache the context keys of what became final; learn from what was emitted."""
        assert commit.hidden is not None, "the target is tapped"
        self._cache(commit.hidden, commit)
        asked, self._asked = self._asked, None
        # A proposal is judged by the very next commit of the same rows, or not at all.
        if asked is not None and asked[0] is commit.rows:
            judged = drafts.emitted(commit.cu, commit.next_ids, self.num_positions)
            self._calibration.note(asked[2], asked[1], judged)

    def _cache(self, features: Tensor, commit: Commit) -> None:
        net, positions, slots = self.net, commit.positions, commit.slots
        if net.stacks(features.shape[0]):
            product, eps = net.stacked(features), net.config.rms_norm_eps
            angles, gains = net.rope.cos_sin, net.gains
            self._runtime.write_context(product, positions, slots, angles, gains, eps)
            return
        for layer, (k, v) in enumerate(net.context(features, positions, "layer")):
            self._runtime.write(layer, slots, k, v)

    @torch.inference_mode()
    def candidates(self, rows: Tensor, roots: Tensor, count: int) -> Candidates:
        """Run the block for rows [B] with newest tokens `roots` [B]; rank `count` tokens or more a position."""
        temperature = self._runtime.temperature(rows)
        hidden = self._hidden(rows, roots)
        # Reading this is free on a CPU, where ranking more candidates than needed is not.
        greedy = temperature.is_cpu and not bool((temperature > 0).any())
        count = max(count, _GREEDY if greedy else SAMPLED)
        vocab = self.net.target.config.vocab_size
        parts = []
        for part in batches(rows.shape[0], self.num_positions, vocab, rows.device):
            inputs = rows[part], hidden[part], temperature[part]
            parts.append(self._ranked(*inputs, count, greedy=greedy))
        found = Candidates.cat(parts)
        self._asked = (rows, temperature, found)
        return found

    def _ranked(
        self,
        rows: Tensor,
        hidden: Tensor,
        temperature: Tensor,
        count: int,
        *,
        greedy: bool,
    ) -> Candidates:
        """Candidates of rows [B] from hidden states [B, P, H]; `greedy`: all rows are known to be."""
        logits = self.net.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

        def noise(ids: Tensor) -> Tensor:
            return self._runtime.noise_ahead(rows, ids)

        count = min(count, logits.shape[-1])
        asks, gains = None if greedy else noise, None
        if self.net.selector is not None:
            count, gains = self.net.selector.top_k, self._gains(rows, hidden, self.net.selector)
        return rank(logits, temperature, asks, self._calibration, count, gains)

    def _gains(self, rows: Tensor, hidden: Tensor, selector: Selector) -> Gains:
        """DFlash 2's second look at candidates; the first position follows the row's newest token."""
        projected = selector.projected(hidden)

        def gains(position: int, before: Tensor | None, ids: Tensor) -> Tensor:
            before = self.roots(rows) if before is None else before
            return selector.gains(projected[:, position], before, ids)

        return gains

    def roots(self, rows: Tensor) -> Tensor:
        """Newest token [B] int64 of each row."""
        return self._runtime.next_token(rows)

    def _hidden(self, rows: Tensor, roots: Tensor) -> Tensor:
        """One block pass: hidden states [B, P, H] of the proposed positions."""
        masks = self._masks.expand(rows.shape[0], -1)
        tokens = torch.cat((roots.unsqueeze(1), masks), dim=1)
        batch = self._runtime.block(rows, tokens, self._mask)
        hidden = self._runtime.forward(self.net, batch).hidden
        return hidden.view(*tokens.shape, -1)[:, self._first : self._first + self.num_positions]


class DFlashDrafter:
    """One chain per row: the best candidate of every position.

    Scores are sums of the candidates' log survivals (`candidates.py`). A position's distribution does
    not know which tokens were chosen before it, so survival is estimated position by position; what
    that gets wrong on average is learned with the rest.

    Args:
        config: `model` is the drafter's folder, `num_speculative_tokens` the longest chain.
        target: facts, embedding and head of the target.
        net: the network, where it does not come from that folder.

    Raises:
        ConfigError: no folder is given, or the drafter does not belong to the target.
        ModelError: its files are missing, damaged or of a layout that is not supported.
    """

    def __init__(
        self, config: DraftConfig, target: TargetInfo, net: DFlashNet | None = None
    ) -> None:
        net = load_net(config, target) if net is None else net
        self._block = DFlashBlock(net, config.num_speculative_tokens)
        nodes = 1 + self._block.num_positions
        self.spec = self._block.spec("dflash", nodes)
        self._shape = tree.straight(nodes, SOURCE, target.device)

    def attach(self, runtime: DraftRuntime) -> None:
        """See `Drafter`."""
        self._block.attach(runtime)

    def observe(self, commit: Commit) -> None:
        """See `Drafter`."""
        self._block.observe(commit)

    def propose(self, rows: Tensor) -> DraftTree:
        """See `Drafter`."""
        roots = self._block.roots(rows)
        if not self._block.num_positions:
            return tree.root(roots)
        found = self._block.candidates(rows, roots, 1)
        return tree.chain_like(self._shape, *drafts.chain(roots, found.ids, found.weights))


def load_net(config: DraftConfig, target: TargetInfo) -> DFlashNet:
    """The network of the folder that a configuration names.

    Raises:
        ConfigError: it names none, or a drafter for another target.
        ModelError: files are missing, damaged or of a layout that is not supported.
    """
    return load(checkpoint_folder.locate(config), target)
