"""Drafter networks on a GPU never wait for the host: shown with meta tensors, on any machine.

A meta tensor has shape and dtype but no values, and is not on a CPU. Reading a value, branching on one,
or a shape that depends on one raises. What runs through could be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.core.batch import AttnSite, ForwardBatch, ForwardMode, ForwardOutput
from paceline.core.config import DraftConfig, RopeConfig
from paceline.core.tree import DraftTree
from paceline.draft import checkpoint_folder, eagle3
from paceline.draft.base import Commit, DraftNet, TargetInfo
from paceline.draft.ddtree import best_first
from paceline.draft.dflash import DFlashBlock
from paceline.draft.dflash_config import DFlashConfig, read_config
from paceline.draft.dflash_net import DFlashNet
from paceline.draft.eagle3_config import Eagle3Config
from paceline.draft.eagle3_net import Eagle3Net
from paceline.ops.reference import growth
from tests import tiny, tiny_drafters

B, V = 3, 97


class Runtime:
    """The engine's side, on the fake device: shapes only, attention is the query itself."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.levels: list[int] = []

    def lens(self, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    next_token = lens

    def temperature(self, rows: Tensor) -> Tensor:
        return torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)

    def noise(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        assert rows.shape == positions.shape == token_ids.shape[:1]
        return torch.zeros(token_ids.shape, dtype=torch.float32, device=rows.device)

    def noise_ahead(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        assert token_ids.shape[0] == rows.shape[0]
        return torch.zeros(token_ids.shape, dtype=torch.float32, device=rows.device)

    def block(self, rows: Tensor, token_ids: Tensor, mask: Tensor) -> ForwardBatch:
        count = token_ids.numel()
        flat = torch.zeros(count, dtype=torch.int64, device=rows.device)
        return ForwardBatch(
            mode=ForwardMode.BLOCK,
            num_rows=len(rows),
            q_len=token_ids.shape[1],
            rows=rows,
            token_ids=token_ids.reshape(-1),
            positions=flat,
            slots=flat,
            prefix_lens=rows,
            cu_q=torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device),
            tail_lens=rows,
            mask=mask.repeat(len(rows), 1),
            pages=torch.zeros(len(rows), 4, dtype=torch.int32, device=rows.device),
        )

    num_rows = 7

    def newest(self, rows: Tensor, token_ids: Tensor, features: Tensor) -> ForwardBatch:
        mask = torch.zeros(1, 1, dtype=torch.int64, device=rows.device)
        return replace(self.block(rows, token_ids.unsqueeze(1), mask), features=features)

    def level(
        self, rows: Tensor, token_ids: Tensor, features: Tensor, mask: Tensor, depth: int
    ) -> ForwardBatch:
        assert mask.shape[:2] == features.shape[:2] == token_ids.shape
        self.levels.append(depth)
        return replace(self.block(rows, token_ids, mask[0]), features=features.flatten(0, 1))

    def forward(self, net: DraftNet, batch: ForwardBatch) -> ForwardOutput:
        return net(batch, self)

    def heads(self, site: AttnSite, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert k.shape == v.shape
        return q

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        assert slots.shape == k.shape[:1] == v.shape[:1]
        self.written.append(layer)

    def write_context(
        self,
        product: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        gains: Tensor,
        eps: float,
    ) -> None:
        layers, dim = gains.shape
        assert slots.shape == positions.shape == product.shape[:1]
        assert product.shape[1] % (layers * 2 * dim) == 0
        assert cos_sin.shape[1] == dim
        self.written.extend(range(layers))


def valueless(config: DFlashConfig, dtype: torch.dtype) -> tuple[DFlashBlock, Runtime]:
    """A drafter without values."""
    device = torch.device("meta")
    table = torch.zeros(V, 64, dtype=dtype, device=device)
    shape = replace(config.layer_config(), max_position=64)
    target = TargetInfo(
        config=shape,
        device=device,
        dtype=dtype,
        embed=lambda ids: table[ids],
        head=lambda hidden: (hidden @ table.T).float(),
    )
    net = DFlashNet(config, target).requires_grad_(requires_grad=False)
    net.rope.to(device)
    net.stack()
    block, runtime = DFlashBlock(net, 5), Runtime()
    block.attach(runtime)
    return block, runtime


@pytest.fixture(autouse=True)
def clean_cache() -> Iterator[None]:
    """No tensor without values stays behind in a cache."""
    yield
    growth.pairs.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_reads_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    """Propose a chain's and a tree's candidates, build the tree, observe a commit, learn from it."""
    base = tiny.write_tiny(tmp_path / "target", "llama")
    config = read_config(tiny_drafters.write_dflash(tmp_path / "drafter", base, block_size=6))
    block, runtime = valueless(config, dtype)
    device = torch.device("meta")
    rows = torch.arange(B, device=device)
    found = block.candidates(rows, block.roots(rows), 16)
    assert found.ids.shape == (B, 5, V)  # sampled rows need many; the vocabulary is small
    assert found.weights.device.type == "meta"
    tree = best_first(block.roots(rows), found, 16)
    assert isinstance(tree, DraftTree)
    assert tree.token_ids.shape == (B, 17)
    assert tree.mask.shape == (B, 17, 1)
    tokens = 11
    flat = torch.zeros(tokens, dtype=torch.int64, device=device)
    before = block._calibration._log._version
    block.observe(
        Commit(
            rows=rows,
            cu=torch.zeros(B + 1, dtype=torch.int64, device=device),
            token_ids=flat,
            next_ids=flat,
            positions=flat,
            slots=flat,
            hidden=torch.zeros(tokens, 128, dtype=dtype, device=device),
        )
    )
    assert runtime.written == [0, 1]
    assert block._calibration._log._version > before, "nothing was learned"


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_eagle3_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int
) -> None:
    """Grow a chain or a tree pass by pass, observe a commit, learn from it."""
    device = torch.device("meta")
    config = Eagle3Config(
        hidden_size=64,
        target_hidden_size=64,
        intermediate_size=80,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=V,
        draft_vocab_size=60,
        aux_layers=(0, 1, 1),
        max_position=64,
        rope=RopeConfig(),
        fc_norm=True,
        norm_output=True,
    )
    table = torch.zeros(V, 64, dtype=dtype, device=device)
    target = TargetInfo(
        config=config.layer_config(),
        device=device,
        dtype=dtype,
        embed=lambda ids: table[ids],
        head=lambda hidden: hidden,
    )
    net = Eagle3Net(config, target).requires_grad_(requires_grad=False)
    net.place_tables(device)
    monkeypatch.setattr(eagle3, "load", lambda *_: net)
    monkeypatch.setattr(checkpoint_folder, "locate", lambda _: Path())
    drafter = eagle3.Eagle3Drafter(
        DraftConfig(eagle_topk=width, eagle_num_steps=4, num_speculative_tokens=9), target
    )
    runtime = Runtime()
    drafter.attach(runtime)
    rows = torch.arange(B, device=device)
    tree = drafter.propose(rows)
    nodes = 5 if width == 1 else 10
    assert tree.token_ids.shape == tree.scores.shape == (B, nodes)
    assert tree.token_ids.device.type == "meta"
    assert runtime.levels == [1, 2, 3], "a pass for each level but the last"
    flat = torch.zeros(11, dtype=torch.int64, device=device)
    before = drafter._calibration._log._version
    drafter.observe(
        Commit(
            rows=rows,
            cu=torch.zeros(B + 1, dtype=torch.int64, device=device),
            token_ids=flat,
            next_ids=flat,
            positions=flat,
            slots=flat,
            hidden=torch.zeros(11, 192, dtype=dtype, device=device),
        )
    )
    assert runtime.written == [0]
    assert drafter._calibration._log._version > before, "nothing was learned"


def test_a_read_would_be_noticed() -> None:
    """The control: what the test above relies on raises where a host would read a value."""
    weights = torch.zeros(1, 2, 3, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((weights > 0).any())
    with pytest.raises((RuntimeError, NotImplementedError)):
        weights[weights > 0].sum().item()
