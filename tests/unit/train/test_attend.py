"""Attention of training: masks against a dense definition, and the same block logits as in service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.batch import AttnSite
from paceline.core.request import SamplingParams
from paceline.draft import dflash_checkpoint
from paceline.draft.dflash_net import DFlashNet
from paceline.models import LoadedModel
from paceline.train.attend import Blocks, PackedCausal
from paceline.train.dflash import DFlashTask
from paceline.train.packing import Geometry, assemble, lay_out
from paceline.train.shards import Doc
from tests.engine.harness import engine, request, run
from tests.unit.train.making import BLOCK, DECAY, random_docs, write_docs

SITES = [
    AttnSite(index=0, scale=0.3),
    AttnSite(index=0, scale=0.3, tail="causal"),
    AttnSite(index=0, scale=0.3, window=6),
    AttnSite(index=0, scale=0.3, window=4, tail="causal"),
]


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float) -> Tensor:
    """[Q, Hq, D] queries over [K, Hkv, D] keys; sees [Q, K]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    probs = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", probs, v)


def randn(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


@pytest.mark.parametrize("site", SITES)
def test_blocks_see_their_context_and_themselves(tmp_path: Path, site: AttnSite) -> None:
    """Strictly before the anchor, own sequence, own block, window and tail rule: nothing else."""
    shards = write_docs(tmp_path, random_docs(12))
    geometry = Geometry(rows=2, row_tokens=64, anchors=7, targets=BLOCK - 1)
    batch = assemble(shards, [[1, 2], [3, 4]], geometry, np.random.default_rng(0))
    rows, size, num, b = 2, 64, 7, BLOCK
    context = randn(rows * size, 2, 8), randn(rows * size, 2, 8) + 1
    q, k, v = randn(rows * num * b, 4, 8), randn(rows * num * b, 2, 8), randn(rows * num * b, 2, 8)
    attend = Blocks(
        context=[context],
        docs=batch.docs,
        positions=batch.positions,
        anchors=batch.anchors,
        block=b,
    )
    found = attend.heads(site, q, k, v).view(rows, num, b, 4, 8)
    for s in range(rows):
        for n in range(num):
            anchor = int(batch.anchors[s, n])
            block = slice((s * num + n) * b, (s * num + n + 1) * b)
            keys = torch.cat((context[0][s * size : (s + 1) * size], k[block]))
            values = torch.cat((context[1][s * size : (s + 1) * size], v[block]))
            start = int(batch.positions[s, anchor])
            key_pos = torch.cat((batch.positions[s], torch.arange(start, start + b)))
            own = batch.docs[s] == batch.docs[s, anchor]
            clean = own & (torch.arange(size) < anchor)
            sees = torch.zeros(b, size + b, dtype=torch.bool)
            for i in range(b):
                sees[i] = torch.cat((clean, torch.ones(b, dtype=torch.bool)))
                if site.tail == "causal":
                    sees[i, size + i + 1 :] = False
                if site.window is not None:
                    sees[i] &= key_pos > start + i - site.window
            expected = softmax_attention(q[block], keys, values, sees, site.scale)
            torch.testing.assert_close(found[s, n], expected)


@pytest.mark.parametrize("site", [SITES[0], SITES[2]])
def test_packed_sequences_do_not_see_each_other(tmp_path: Path, site: AttnSite) -> None:
    """A sequence in a packed row attends as it would alone; padding makes no NaN."""
    shards = write_docs(tmp_path, random_docs(12))
    geometry = Geometry(rows=2, row_tokens=100, anchors=1, targets=1)
    layout = lay_out(shards, [[1, 2], [3]], geometry)
    docs, positions = torch.from_numpy(layout.docs), torch.from_numpy(layout.positions)
    q, k, v = randn(200, 4, 8), randn(200, 2, 8), randn(200, 2, 8) + 1
    found = PackedCausal(docs, positions).heads(site, q, k, v)
    assert found.isfinite().all()
    for s, number in ((0, 0), (0, 1), (1, 0)):
        at = s * 100 + torch.nonzero(docs[s] == number).squeeze(1)
        step = torch.arange(len(at))
        sees = step[:, None] >= step
        if site.window is not None:
            sees &= step[:, None] - step < site.window
        expected = softmax_attention(q[at], k[at], v[at], sees, site.scale)
        torch.testing.assert_close(found[at], expected)


def test_training_blocks_equal_serving_blocks(
    tmp_path: Path, target: LoadedModel, target_folder: Path, net: DFlashNet
) -> None:
    """What a block computes in training is what the engine's drafter computes on the same text."""
    folder = tmp_path / "drafter"
    dflash_checkpoint.save(net, folder, dtype=torch.float64)
    eng = engine(
        target_folder, method="dflash", model=str(folder), num_speculative_tokens=BLOCK - 1
    )
    drafter = eng._proposer._drafter._block
    seen: list[tuple[int, Tensor]] = []  # place of the root, hidden states of the predicted rows

    serve = drafter._hidden

    def spy(rows: Tensor, roots: Tensor) -> Tensor:
        hidden = serve(rows, roots)
        seen.extend(zip(drafter._runtime.lens(rows).tolist(), hidden, strict=True))
        return hidden

    drafter._hidden = spy
    prompt = [(5 * i) % 60 + 3 for i in range(11)]
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True)
    tokens = run(eng, [request("a", prompt, params)])["a"].tokens

    doc = Doc(token_ids=[*prompt, *tokens], num_prompt=len(prompt))
    shards = write_docs(tmp_path / "docs", [*random_docs(3), doc])
    geometry = Geometry(rows=1, row_tokens=128, anchors=40, targets=BLOCK - 1)
    batch = assemble(shards, [[1, 3]], geometry, np.random.default_rng(0))  # all anchors fit
    hidden = DFlashTask(target.net, net, DECAY).hidden(batch).detach()
    start = int(shards.docs["length"][1])  # the other sequence comes first in the row
    where = {int(a): i for i, a in enumerate(batch.anchors[0].tolist()) if batch.alive[0, i]}
    places = [place for place, _ in seen if place < len(doc.token_ids) - 1]
    assert len(places) > 10
    for place, served in seen:
        if place < len(doc.token_ids) - 1:
            torch.testing.assert_close(hidden[where[start + place]], served, rtol=1e-9, atol=1e-9)
