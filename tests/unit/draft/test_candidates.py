"""Candidates ranked by the target's own noise, and what their gaps say about survival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from paceline.draft.candidates import Calibration, Candidates, batches, rank
from paceline.sample.noise import gumbel, hash_tokens, noise_words_of

VOCAB = 500


def logits_of(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB, generator=generator) * spread


def noise_of(temperature: Tensor, ids: Tensor) -> Tensor:
    """As the engine's: keyed by row and position, 0 for greedy rows."""
    rows, positions = ids.shape[:2]
    keys = torch.arange(rows).repeat_interleave(positions) * 7919
    words = noise_words_of(keys, torch.arange(positions).repeat(rows))
    noise = gumbel(hash_tokens(ids.flatten(0, 1).to(torch.int32), words), torch.float32)
    return noise.view(ids.shape) * (temperature > 0).view(-1, 1, 1)


def full_noise(temperature: Tensor, positions: int) -> Tensor:
    ids = torch.arange(VOCAB).expand(len(temperature), positions, -1)
    return noise_of(temperature, ids)


def plain(positions: int) -> Calibration:
    """Before anything was learned, and with sampled rows' sharpness 1 too."""
    new = Calibration(positions, torch.device("cpu"))
    new._log = torch.zeros_like(new._log)
    return new


def found(logits: Tensor, temperature: Tensor, count: int) -> Candidates:
    new = plain(logits.shape[1])
    return rank(logits, temperature, lambda ids: noise_of(temperature, ids), new, count)


def picks(logits: Tensor, temperature: Tensor) -> Tensor:
    """The target's tokens [B, P]: argmax of tempered logits plus the same noise."""
    heat = torch.where(temperature > 0, temperature, 1.0).view(-1, 1, 1)
    return (logits / heat + full_noise(temperature, logits.shape[1])).argmax(-1)


def test_the_whole_vocabulary_by_brute_force() -> None:
    """With all tokens as candidates: sorted by perturbed score, survival a softmax over everything;
    at temperature 0 that is the drafter's log-probability.
    """
    logits, temperature = logits_of(3, 4), torch.tensor([0.0, 0.7, 1.0])
    got = found(logits, temperature, VOCAB)
    heat = torch.tensor([1.0, 0.7, 1.0]).view(-1, 1, 1)
    scores = logits / heat + full_noise(temperature, 4)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(got.ids, order)
    torch.testing.assert_close(got.scores, scores.gather(-1, order))
    weights = (scores * heat).log_softmax(-1)  # errors of scores grow as 1 / temperature
    torch.testing.assert_close(got.weights, weights.gather(-1, order))


def test_few_candidates_keep_the_vocabulary_in_their_weights() -> None:
    """Of a greedy row few candidates are taken, and their weights are still log-probabilities."""
    logits, greedy = logits_of(2, 3), torch.zeros(2)
    few, every = found(logits, greedy, 5), found(logits, greedy, VOCAB)
    assert torch.equal(few.ids, every.ids[:, :, :5])
    torch.testing.assert_close(few.weights, every.weights[:, :, :5])
    assert bool((found(logits, torch.ones(2), 64).weights.exp().sum(-1) <= 1.0001).all())


@pytest.mark.parametrize("vocab", [4096, 4100])
def test_the_largest_of_many_are_found_in_two_stages(vocab: int) -> None:
    """What a CPU does to find few of many is `topk`, whether or not the vocabulary divides evenly; and
    a batch known to be greedy is ranked as one that merely is.
    """
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 3, vocab, generator=generator) * 4
    logits[0, 0, 130:140] = 30.0  # the best ones in one block
    for count in (1, 10, 16, 40):
        got = rank(logits, torch.zeros(2), None, plain(3), count)
        assert torch.equal(got.scores, logits.topk(count).values)
        assert torch.equal(logits.gather(-1, got.ids), got.scores)
        again = rank(logits, torch.zeros(2), torch.zeros_like, plain(3), count)
        assert torch.equal(again.ids, got.ids)
        torch.testing.assert_close(got.weights, logits.log_softmax(-1).gather(-1, got.ids))


def test_logits_exist_in_parts_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are in one part, in order; a GPU has 960 at once if it is large, a small one fewer."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for rows, positions in ((0, 15), (1, 15), (9, 15), (64, 200), (7, 128)):
        parts = batches(rows, positions, 151_936, cpu)
        assert [i for part in parts for i in range(rows)[part]] == list(range(rows))
        sizes = {len(range(rows)[part]) for part in parts}
        assert all(size * positions <= max(128, positions) for size in sizes)
    assert [len(range(9)[part]) for part in batches(9, 15, 97, cpu)] == [5, 4]
    for memory, count in ((140 << 30, 1), (24 << 30, 2), (8 << 30, 5)):
        named = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, named=named: named)
        assert len(batches(64, 15, 151_936, gpu)) == count


def test_a_perfect_drafter_is_always_right() -> None:
    """A drafter with the target's own logits proposes the target's own sample, at any temperature."""
    logits, temperature = logits_of(4, 50), torch.tensor([0.0, 0.3, 0.7, 1.0])
    assert torch.equal(found(logits, temperature, 128).ids[:, :, 0], picks(logits, temperature))


def test_equal_logits_go_to_the_lowest_id() -> None:
    """Ties, which 16-bit logits often have, are broken the same way everywhere."""
    logits = torch.zeros(1, 1, VOCAB)
    logits[0, 0, [9, 33, 200]] = 4.0
    assert found(logits, torch.zeros(1), 3).ids.flatten().tolist() == [9, 33, 200]


def test_rows_are_ranked_alone() -> None:
    """Greedy and sampled rows in one batch do not change one another."""
    logits, temperature = logits_of(4, 3), torch.tensor([0.0, 1.0, 0.0, 0.5])
    together = found(logits, temperature, 20)
    alone = rank(
        logits[1:2],
        temperature[1:2],
        lambda ids: noise_of(temperature, ids.expand(4, -1, -1))[1:2],
        plain(3),
        20,
    )
    assert torch.equal(together.ids[1:2], alone.ids)
    torch.testing.assert_close(together.weights[1:2], alone.weights)


def imperfect(temperature: float, error: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A target's picks, a drafter's logits with Gaussian errors, and the temperatures."""
    heat = torch.full((1,), temperature)
    target = logits_of(1, 3000, seed=seed, spread=3.0)
    return picks(target, heat), target + error * logits_of(1, 3000, seed=seed + 1, spread=1.0), heat


def test_shared_noise_beats_rejection_and_ranking_by_q() -> None:
    """At temperature 1, one child ranked with the noise is right far more often than q's best, two
    children more often than any rule without the noise: 1 minus the total variation.
    """
    true, logits, heat = imperfect(1.0, 0.45)
    shared = (found(logits, heat, 128).ids[:, :, :2] == true.unsqueeze(-1)).float().cumsum(-1)
    by_q = (logits.topk(2).indices == true.unsqueeze(-1)).float().cumsum(-1)
    target = logits_of(1, 3000, seed=0, spread=3.0).softmax(-1)
    best_rule = torch.minimum(target, logits.softmax(-1)).sum(-1).mean()
    one, two = shared.mean((0, 1)).tolist()
    assert one > 2 * float(by_q[..., 0].mean())
    assert two > 2 * float(by_q[..., 1].mean())
    assert one > float(best_rule) - 0.1
    assert two > float(best_rule)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("error", [0.3, 0.7, 1.5])
def test_learned_survival_is_calibrated(temperature: float, error: float) -> None:
    """After learning, candidates that claim a survival are right about that often, class by class.

    The rule assumes Gumbel errors; these are Gaussian, whose tails it overrates where they are large.
    """
    calibration = Calibration(1, torch.device("cpu"))
    true, logits, heat = imperfect(temperature, error)
    for step in range(0, 3000, 10):  # ten rows at a time, one position each
        part = slice(step, step + 10)
        some = rank_rows(logits[0, part], heat, calibration, true[0, part], step)
        calibration.learn(some, heat.expand(10), true[0, part].unsqueeze(1))
    claimed, right = [], []
    fresh_true, fresh, _ = imperfect(temperature, error, seed=77)
    got = rank_rows(fresh[0], heat, calibration, fresh_true[0], 0)
    for place in range(4):
        claimed.append(got.weights[:, 0, place].exp())
        right.append((got.ids[:, 0, place] == fresh_true[0]).float())
    claims, hits = torch.cat(claimed), torch.cat(right)
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 0.9), (0.9, 1.01)):
        chosen = (claims >= low) & (claims < high)
        if int(chosen.sum()) < 100:
            continue
        off = float(claims[chosen].mean() - hits[chosen].mean())
        assert abs(off) < (0.08 if error < 1 else 0.16), (low, high)


def rank_rows(
    logits: Tensor, heat: Tensor, calibration: Calibration, true: Tensor, start: int
) -> Candidates:
    """Positions [n, V] of one text as n rows, with the noise of their own positions."""
    n = logits.shape[0]
    keys, places = torch.zeros(n, dtype=torch.int64), torch.arange(start, start + n)

    def noise(ids: Tensor) -> Tensor:
        words = noise_words_of(keys, places)
        drawn = gumbel(hash_tokens(ids[:, 0].to(torch.int32), words), torch.float32)
        return (drawn * (heat > 0)).unsqueeze(1)

    assert true.shape == (n,)
    temperature = heat.expand(n)
    return rank(logits.unsqueeze(1), temperature, noise, calibration, 128)


def judged(
    calibration: Calibration, emitted: Callable[[Tensor, Tensor], Tensor], error: float
) -> None:
    """Learn from 1,000 tokens at temperature 1, as rows of two positions with equal candidates.

    `emitted` makes of the true tokens and of the best candidates, [10] each, what was emitted, [10, 2].
    """
    true, logits, heat = imperfect(1.0, error)
    for step in range(0, 1000, 10):
        part = slice(step, step + 10)
        some = rank_rows(logits[0, part], heat, calibration, true[0, part], step)
        both = Candidates(
            **{
                f.name: getattr(some, f.name).expand(
                    -1, 2, *[-1] * (getattr(some, f.name).ndim - 2)
                )
                for f in fields(some)
            }
        )
        calibration.learn(both, heat.expand(10), emitted(true[0, part], some.ids[:, 0, 0]))


@pytest.mark.parametrize("error, sign", [(0.1, 1), (2.5, -1)])
def test_sharpness_learns_in_the_right_direction(error: float, sign: int) -> None:
    """Good drafters become sharper, bad ones flatter; greedy and sampled rows apart, and nothing is
    learned from tokens that were not emitted.
    """
    calibration = Calibration(2, torch.device("cpu"))
    before = calibration._log.clone()
    judged(calibration, lambda true, _: torch.stack((true, torch.full_like(true, -1)), 1), error)
    after = calibration._log
    assert torch.equal(after[:2], before[:2]), "greedy rows were not seen"
    assert torch.equal(after[2:, 1], before[2:, 1]), "the second position was never emitted"
    assert after[3, 0] == before[3, 0], "the first position is always on the spine"
    assert sign * float(after[2, 0] - before[2, 0]) > 0.1


def test_the_spine_and_what_left_it_are_judged_apart() -> None:
    """A second token teaches about the spine only where the first was the spine's."""
    calibration = Calibration(2, torch.device("cpu"))
    before = calibration._log.clone()
    judged(calibration, lambda true, best: torch.stack((best, true), 1), 0.3)
    assert calibration._log[2, 1] != before[2, 1]
    assert calibration._log[3, 1] == before[3, 1]
    kept = calibration._log.clone()
    stray = torch.full((10,), VOCAB)
    judged(calibration, lambda true, _: torch.stack((stray, true), 1), 2.5)
    assert calibration._log[2, 1] == kept[2, 1]
    assert calibration._log[3, 1] < kept[3, 1]


def test_reach_is_learned() -> None:
    """Where emitted tokens often are no candidates, all candidates are worth less; tokens that no
    candidate could be do not touch the sharpness.
    """
    calibration = Calibration(2, torch.device("cpu"))
    before = calibration._log.clone()
    outside = torch.full((10,), VOCAB)
    judged(calibration, lambda _, __: torch.stack((outside, outside), 1), 0.3)
    assert torch.equal(calibration._log, before)
    reach = calibration.reach(torch.tensor([0.0, 1.0]))
    assert bool((reach[0] == 0).all())
    assert reach[1, 0, 0] < -1
    assert reach[1, 1, 1] < -1
    logits, heat = logits_of(1, 2), torch.ones(1)
    worth = rank(logits, heat, torch.zeros_like, calibration, 64).weights.exp().sum(-1)
    assert float(worth[0, 0]) < 0.4


def test_a_cpu_learns_from_several_steps_at_once() -> None:
    """What was noted is learned together, whatever number of candidates steps have, and nothing twice."""
    noted, learned = (Calibration(2, torch.device("cpu")) for _ in range(2))
    noted._num_learned = 64
    steps = []
    for seed in range(4):  # of two rows each
        logits, temperature = logits_of(2, 2, seed=seed), torch.tensor([0.0, 1.0])
        some, other = found(logits, temperature, 20), found(logits, temperature, 9)
        emitted = picks(logits + logits_of(2, 2, seed=seed + 99, spread=1.0), temperature)
        before = noted._log.clone()
        noted.note(some, temperature, emitted)
        assert torch.equal(noted._log, before) == (seed < 3)
        noted.note(other, temperature, torch.full_like(emitted, -1))
        steps.append((some, temperature, emitted))
    parts = list(zip(*steps, strict=True))
    learned.learn(Candidates.cat(parts[0]), torch.cat(parts[1]), torch.cat(parts[2]))
    torch.testing.assert_close(noted._log, learned._log)
    torch.testing.assert_close(noted._held, learned._held)
    assert not any(noted._noted.values())


def test_what_waits_is_a_small_part_of_what_was_learned() -> None:
    """A young calibration learns from every step: its first numbers are worth the most."""
    noted = Calibration(1, torch.device("cpu"))
    logits, temperature = logits_of(1, 1), torch.ones(1)
    some = found(logits, temperature, 20)
    gaps, last = [], -1
    for step in range(200):
        before = noted._held.clone()
        noted.note(some, temperature, some.ids[:, :, 0])
        if not torch.equal(noted._held, before):
            gaps.append(step - last)
            last = step
    assert gaps[:16] == [1] * 16
    assert gaps[-1] == 8
    assert gaps == sorted(gaps)
