"""EAGLE-3 in training: unrolled chains, loss and gradients against the formulas, chain by chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.draft.eagle3_net import Eagle3Net
from paceline.models import LoadedModel
from paceline.train import soft_loss
from paceline.train.eagle3 import Eagle3Task, new_config
from paceline.train.eagle3_settings import Eagle3Settings
from paceline.train.losses import RowWeights
from paceline.train.packing import Batch, Geometry, Packer
from paceline.train.shards import Doc
from tests.unit.train.making import (
    CHAIN,
    DECAY,
    new_eagle3,
    new_eagle3_task,
    random_docs,
    write_docs,
)

FORMS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
]
GEOMETRY = Geometry(rows=2, row_tokens=64, anchors=11, targets=CHAIN)


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    """Two packed rows of random sequences."""
    return Packer(write_docs(tmp_path / "docs", random_docs(12)), GEOMETRY, 0).batch(0)


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


class Formulas:
    """The paper's drafter, one chain at a time: lists of keys and values, and a softmax over them."""

    def __init__(self, net: Eagle3Net) -> None:
        self.net, self.config = net, net.config
        q, k = (net.config.num_heads, net.config.num_kv_heads)
        self.sizes = [q * net.config.head_dim, k * net.config.head_dim, k * net.config.head_dim]

    def norm(self, module: Any, x: Tensor) -> Tensor:
        return rms(x, module.weight, self.config.rms_norm_eps)

    def feature(self, aux: Tensor) -> Tensor:
        """fc of low, middle and high."""
        if self.net.input_norm is not None:
            aux = self.norm(self.net.input_norm, aux)
        if self.net.fc_norm is not None:
            parts = aux.chunk(3)
            aux = torch.cat([self.norm(n, p) for n, p in zip(self.net.fc_norm, parts, strict=True)])
        return self.net.fc.weight @ aux

    def entry(self, token: int, feature: Tensor, position: int) -> tuple[Tensor, ...]:
        """Query [Hq, D], key, value [Hkv, D] and the stream [H] before attention."""
        normed = self.norm(self.net.hidden_norm, feature)
        embedded = self.net.target.embed(torch.tensor([token]))[0]
        x = torch.cat((self.norm(self.net.embed_norm, embedded), normed))
        q, k, v = (self.net.attention.qkv.weight @ x).split(self.sizes)
        q, k, v = (part.view(-1, self.config.head_dim) for part in (q, k, v))
        q, k = (part[0] for part in self.net.rope(q[None], k[None], torch.tensor([position])))
        return q, k, v, normed if self.config.norm_before_residual else feature

    def output(self, q: Tensor, keys: list[Tensor], values: list[Tensor], stream: Tensor) -> Tensor:
        """The layer's output stream [H]."""
        group = self.config.num_heads // self.config.num_kv_heads
        k = torch.stack(keys).repeat_interleave(group, 1)
        v = torch.stack(values).repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", q, k) * self.config.head_dim**-0.5
        mixed = torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten()
        stream = stream + self.net.attention.out.weight @ mixed
        gate, up = (self.net.mlp.gate_up.weight @ self.norm(self.net.mlp_norm, stream)).chunk(2)
        return stream + self.net.mlp.down.weight @ (torch.nn.functional.silu(gate) * up)

    def chain(self, tokens: list[int], aux: Tensor, root: int, steps: int) -> list[Tensor]:
        """Draft logits [Vd] of each step of the chain from the token at `root`."""
        entries = [
            self.entry(tokens[i + 1], self.feature(aux[i]), i) for i in range(root)
        ]  # feature i goes with token i + 1
        keys, values = [e[1] for e in entries], [e[2] for e in entries]
        out: Tensor | None = None
        found = []
        for k in range(steps):
            if root + k >= len(tokens):
                break
            if out is None:
                q, _, _, stream = entries[-1]
            else:
                fed = self.norm(self.net.norm, out) if self.config.norm_output else out
                q, key, value, stream = self.entry(tokens[root + k], fed, root - 1 + k)
                keys, values = [*keys, key], [*values, value]
            out = self.output(q, keys, values, stream)
            found.append(self.net.lm_head.weight @ self.norm(self.net.norm, out))
        return found


def chains(
    batch: Batch, aux: Tensor, output: Tensor
) -> list[tuple[list[int], Tensor, Tensor, int]]:
    """Tokens, taps and target outputs of each live anchor's own sequence, and its place therein."""
    rows, size = batch.token_ids.shape
    aux, output = aux.view(rows, size, -1), output.view(rows, size, -1)
    found = []
    for s in range(rows):
        for n in range(batch.anchors.shape[1]):
            if batch.alive[s, n]:
                place = int(batch.anchors[s, n])
                own = batch.docs[s] == batch.docs[s, place]
                start = int(own.nonzero()[0])
                tokens = batch.token_ids[s, own].tolist()
                found.append((tokens, aux[s, own], output[s, own], place - start))
    return found


def slow_loss(task: Eagle3Task, batch: Batch, weigh: RowWeights) -> Tensor:
    """The definition: chain by chain, step by step, token by token of the draft vocabulary."""
    net, formulas = task.net, Formulas(task.net)
    head = task.target.lm_head.weight
    total, mass = head.new_zeros(()), head.new_zeros(())
    for tokens, aux, output, root in chains(batch, *task.read(batch)):
        logits = formulas.chain(tokens, aux, root, task.num_steps)
        losses, probs, known = [], [], []
        for k, step in enumerate(logits):
            wanted = head @ output[root + k]
            p = wanted[net.d2t].softmax(-1)
            log_q = step.log_softmax(-1)
            best = int(wanted.argmax())
            good = bool(net.t2d[best]) and root + k + 1 < len(tokens)
            known.append(good)
            row = int((net.d2t == best).nonzero()[0]) if net.t2d[best] else 0
            probs.append(log_q[row].exp().detach())
            losses.append(-(p * log_q).sum())
        weights = weigh.weights(torch.stack(probs)[None], torch.tensor([known]))[0]
        total = total + (weights * torch.stack(losses)).sum()
        mass = mass + weights.sum()
    return total / mass


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weigh", [DECAY, RowWeights(gamma=3.0, dpace=True, alpha=0.3)])
def test_loss_and_gradients_are_the_formulas(
    target: LoadedModel,
    batch: Batch,
    form: dict[str, bool],
    weigh: RowWeights,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every chain sees its true context and its own steps and nothing else; every parameter learns."""
    monkeypatch.setattr(soft_loss, "_CHUNK_ROWS", 13)
    task = Eagle3Task(target.net, new_eagle3(target, **form), CHAIN, weigh)
    found = task.loss(batch)
    found.backward()
    grads = {name: p.grad for name, p in task.net.named_parameters()}
    task.net.zero_grad()
    expected = slow_loss(task, batch, weigh)
    torch.testing.assert_close(found, expected)
    expected.backward()
    for name, parameter in task.net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        torch.testing.assert_close(grads[name], parameter.grad, msg=lambda m, n=name: f"{n}: {m}")


def text_of_drafts(task: Eagle3Task, start: list[int]) -> list[int]:
    """A text that says, two tokens in three, what the drafter would draft."""
    tokens = list(start)
    for i in range(8):
        ids = torch.tensor([tokens])
        seen = Batch(
            token_ids=ids,
            docs=torch.zeros_like(ids, dtype=torch.int32),
            positions=torch.arange(len(tokens))[None],
            anchors=ids,
            alive=ids > 0,
            targets=ids[..., None],
        )
        aux = task.read(seen)[0]
        for k in range(2):
            logits = Formulas(task.net).chain(tokens, aux, len(start) + 3 * i - 1, k + 1)[-1]
            tokens.append(int(task.net.d2t[logits.argmax()]))
        tokens.append(3 + 5 * i)
    return tokens


def test_matches_are_the_leading_drafts_that_the_text_has(
    target: LoadedModel, tmp_path: Path
) -> None:
    """Against the formulas, drafting freely: each step fed the token that the last one drafted."""
    task = new_eagle3_task(target)
    docs = [*random_docs(4), Doc(token_ids=text_of_drafts(task, [5, 9, 11]), num_prompt=3)]
    batch = Packer(write_docs(tmp_path, docs), replace(GEOMETRY, anchors=40), 0).batch(0)
    formulas = Formulas(task.net)
    expected = []
    for tokens, aux, _, root in chains(batch, *task.read(batch)):
        drafted: list[int] = []
        while len(drafted) < CHAIN:
            text = [*tokens[: root + 1], *drafted]
            logits = formulas.chain(text, aux, root, len(drafted) + 1)[-1]
            drafted.append(int(task.net.d2t[logits.argmax()]))
        going_on = tokens[root + 1 : root + 1 + CHAIN]
        right = [d == t for d, t in zip(drafted, going_on, strict=False)]
        expected.append(right.index(False) if False in right else len(right))
    assert task.matches(batch)[batch.alive].tolist() == expected
    assert max(expected) >= 2, "nothing ever matched"


def test_unused_anchors_and_other_sequences_change_nothing(
    target: LoadedModel, batch: Batch
) -> None:
    """More room for anchors, or other text beside a sequence: equal loss of what is there."""
    task = new_eagle3_task(target)
    loss = task.loss(batch).detach()
    wide = Batch(
        **{
            **{name: getattr(batch, name) for name in ("token_ids", "docs", "positions")},
            "anchors": torch.nn.functional.pad(batch.anchors, (0, 5)),
            "alive": torch.nn.functional.pad(batch.alive, (0, 5)),
            "targets": torch.nn.functional.pad(batch.targets, (0, 0, 0, 5), value=-1),
        }
    )
    torch.testing.assert_close(task.loss(wide).detach(), loss)


def test_compiled_networks_are_one_graph_each(
    target: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile follows the unrolled chains without a break, and the loss is the same."""
    compile_ = torch.compile

    def whole(function: Callable[..., Any], **options: Any) -> Any:
        return compile_(function, backend="eager", fullgraph=True, **options)

    monkeypatch.setattr(torch, "compile", whole)
    plain = new_eagle3_task(target)
    compiled = Eagle3Task(target.net, new_eagle3(target), CHAIN, DECAY, compiled=True)
    one, two = compiled.loss(batch), plain.loss(batch)
    torch.testing.assert_close(one, two)
    one.backward()
    two.backward()
    for (name, a), b in zip(compiled.net.named_parameters(), plain.net.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    assert torch.equal(compiled.matches(batch), plain.matches(batch))


def test_first_weights_know_the_targets_head(target: LoadedModel) -> None:
    """Head and norm point where the target's do, at the usual size; taps are low, middle and high."""
    net = new_eagle3(target)
    rows = target.net.lm_head.weight[net.d2t]
    torch.testing.assert_close(net.lm_head.weight / net.lm_head.weight.norm(), rows / rows.norm())
    assert float(net.lm_head.weight.detach().square().mean().sqrt()) == pytest.approx(0.02)
    assert float(net.norm.weight.detach().square().mean()) == pytest.approx(1.0)
    deep = new_config(Eagle3Settings(), replace(target.config, num_layers=30))
    assert deep.aux_layers == (1, 14, 26)
    assert deep.draft_vocab_size == 97, "no more than the target has"
    assert (deep.fc_norm, deep.norm_output) == (True, True)
    first = new_config(Eagle3Settings(form="eagle3", taps=(0, 1, 2)), target.config)
    assert (first.fc_norm, first.norm_output) == (False, False)
