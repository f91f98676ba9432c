from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.sample import options as opt
from paceline.sample.options import SamplingTable
from paceline.sample.process import edit, filter_tokens, temper
from paceline.sample.rowwise import survivors
from paceline.sample.sampler import PickNodes, choose, choose_host
from tests.oracle import sampling as oracle

V = 61


def random_params(rng: random.Random) -> SamplingParams:
    """Any combination of options, neutral ones often."""

    def maybe(value: float, neutral: float) -> float:
        return value if rng.random() < 0.5 else neutral

    some = rng.sample(range(V), 12)
    return SamplingParams(
        temperature=rng.choice([0, 0.3, 0.7, 1.0, 1.7]),
        top_p=maybe(rng.uniform(0.05, 1), 1.0),
        top_k=int(maybe(rng.randint(1, V + 5), 0)),
        min_p=maybe(rng.uniform(0, 0.3), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias={t: rng.uniform(-5, 5) for t in some[:4]} if rng.random() < 0.4 else {},
        allowed_token_ids=some if rng.random() < 0.2 else None,
        banned_token_ids=some[:3] if rng.random() < 0.3 else (),
        min_tokens=rng.choice([0, 0, 4, 9]),
    )


class Case:
    """One position of a row with random options, a random past and a random path."""

    def __init__(self, rng: random.Random, *, ties: bool) -> None:
        self.params = random_params(rng)
        self.prompt = [rng.randrange(V) for _ in range(rng.randint(1, 8))]
        self.output = [rng.randrange(V) for _ in range(rng.randint(1, 6))]
        self.path = [rng.randrange(V) for _ in range(rng.randint(0, 3))]
        self.stops = rng.sample(range(V + 3), rng.choice([0, 1, 3, 20]))
        self.grammar = set(rng.sample(range(V), 40)) if rng.random() < 0.3 else None
        self.seed = rng.getrandbits(60)
        gen = torch.Generator().manual_seed(rng.getrandbits(40))
        self.logits = torch.randn(V, generator=gen, dtype=torch.float64) * 2
        if ties:
            self.logits = (self.logits * 2).round() / 2
        allowed = self.params.allowed_token_ids
        if self.grammar is not None and allowed is not None:
            self.grammar |= set(allowed)

    def put(self, table: SamplingTable, row: int) -> None:
        table.assign(
            row,
            self.params,
            seed=self.seed,
            sample_index=row,
            prompt_ids=self.prompt,
            output_ids=self.output,
            stop_ids=self.stops,
            limit=1000,
        )

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.output) + len(self.path)

    def explain(self) -> list[float]:
        return oracle.process(
            self.logits.tolist(),
            self.params,
            prompt=self.prompt,
            output=self.output + self.path,
            stop_ids=self.stops,
            grammar=self.grammar,
        )

    def token(self, row: int) -> int:
        return oracle.token(
            self.explain(),
            self.params.temperature,
            oracle.key(self.seed, row),
            self.known,
        )


def nodes_of(cases: Sequence[Case]) -> PickNodes:
    """One entry per case; case i is row i."""
    longest = max(len(c.path) for c in cases)
    return PickNodes(
        rows=torch.arange(len(cases)),
        positions=torch.tensor([c.known for c in cases]),
        num_output=torch.tensor([len(c.output) + len(c.path) for c in cases]),
        path_tokens=torch.tensor([c.path + [-1] * (longest - len(c.path)) for c in cases]).view(
            len(cases), longest
        ),
        allowed=oracle.words([set(range(V)) if c.grammar is None else c.grammar for c in cases], V),
        host_rows=range(len(cases)),
    )


def processed(logits: Tensor, nodes: PickNodes, table: SamplingTable) -> Tensor:
    """What `choose` adds noise to."""
    flags = table.in_play(nodes.host_rows)
    work = edit(
        logits,
        nodes.rows,
        nodes.num_output,
        nodes.path_tokens,
        nodes.allowed,
        table,
        flags,
    )
    work = temper(work, table.temperature[nodes.rows])
    return filter_tokens(work, nodes.rows, table, flags)


@pytest.mark.parametrize("ties", [False, True])
def test_processing_is_the_rules_option_by_option(ties: bool) -> None:
    """Every option, alone and combined, in company: the law that tokens are drawn from."""
    rng = random.Random(7 + ties)
    for _ in range(60):
        cases = [Case(rng, ties=ties) for _ in range(8)]
        table = SamplingTable(8, V, "cpu", 8)
        for row, case in enumerate(cases):
            case.put(table, row)
        got = processed(torch.stack([c.logits for c in cases]), nodes_of(cases), table)
        for row, case in enumerate(cases):
            want = torch.tensor(case.explain(), dtype=torch.float64)
            if case.params.temperature == 0:  # filters keep the best, which is all that matters
                assert int(got[row].argmax()) == int(want.argmax())
                continue
            assert torch.equal(got[row] == oracle.NEG_INF, want == oracle.NEG_INF)
            torch.testing.assert_close(got[row], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("way", [choose, choose_host])
def test_the_token_is_the_rules_token(way: type[choose], ties: bool) -> None:
    """Both ways to choose must emit the very token that the rules emit."""
    rng = random.Random(70 + ties)
    for _ in range(60):
        cases = [Case(rng, ties=ties) for _ in range(8)]
        table = SamplingTable(8, V, "cpu", 8)
        for row, case in enumerate(cases):
            case.put(table, row)
        picks = way(torch.stack([c.logits for c in cases]), nodes_of(cases), table)
        assert picks.tokens.tolist() == [c.token(row) for row, c in enumerate(cases)]


def test_filters_on_survivors_are_filters_on_the_vocabulary() -> None:
    """The CPU's quick filters keep the same tokens, in float32 with ties and a long tail too."""
    rng = random.Random(9)
    for _ in range(80):
        size = rng.choice([5, 300, 5000])
        table = SamplingTable(1, size, "cpu", 1)
        params = SamplingParams(
            temperature=1.0,
            top_p=rng.choice([0.01, 0.5, 0.9, 0.999, 1.0]),
            top_k=rng.choice([0, 1, 2, 40, 4000]),
            min_p=rng.choice([0.0, 0.01, 0.5, 1.0]),
        )
        table.assign(
            0, params, seed=1, sample_index=0, prompt_ids=[0], output_ids=[], stop_ids=[], limit=9
        )
        gen = torch.Generator().manual_seed(rng.getrandbits(40))
        logits = torch.randn(1, size, generator=gen) * rng.choice([0.0, 0.5, 3, 20])
        if rng.random() < 0.5:
            logits = (logits * 4).round() / 4
        if rng.random() < 0.3:
            logits[:, ::3] = oracle.NEG_INF
        flags = table.in_play([0])
        want = filter_tokens(logits, torch.tensor([0]), table, flags)[0]
        ids = survivors(logits[0], table.host(0))
        have = torch.full_like(want, oracle.NEG_INF)
        have[ids if ids is not None else slice(None)] = logits[0][
            ids if ids is not None else slice(None)
        ]
        assert torch.equal(have, want)


def test_ties_at_the_border_go_to_the_lowest_ids() -> None:
    """Whoever sorts, the same tokens are kept: otherwise two machines sample two laws."""
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 1.0])
    for params, want in (
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_k=3), {1, 2, 3}),
        # masses 20.1, 7.4 x 3, 2.7 x 2: 0.65 needs the first and the lowest of the ties only
        (SamplingParams(top_p=0.50), {1, 2}),
        (SamplingParams(top_p=0.60), {1, 2, 3}),
        (SamplingParams(min_p=1.0), {1}),
        (SamplingParams(top_p=1e-9), {1}),
    ):
        table = SamplingTable(1, 6, "cpu", 1)
        table.assign(
            0, params, seed=0, sample_index=0, prompt_ids=[0], output_ids=[], stop_ids=[], limit=9
        )
        kept = filter_tokens(logits.view(1, -1), torch.tensor([0]), table, table.in_play([0]))[0]
        assert set((kept > oracle.NEG_INF).nonzero().view(-1).tolist()) == want
        ids = survivors(logits, table.host(0))
        assert ids is not None
        assert set(ids.tolist()) == want


def test_min_tokens_never_leaves_nothing() -> None:
    """Only stop ids allowed and none of them yet: the ban yields, or token 0 would slip out."""
    params = SamplingParams(temperature=0.0, min_tokens=5, allowed_token_ids=[2, 3])
    for stops, want in (((2, 3), 3), ((3,), 2), (tuple(range(2, 40)), 3)):
        table = SamplingTable(1, V, "cpu", 1)
        table.assign(
            0,
            params,
            seed=0,
            sample_index=0,
            prompt_ids=[0],
            output_ids=[],
            stop_ids=stops,
            limit=99,
        )
        logits = torch.arange(V, dtype=torch.float32).view(1, -1)
        nodes = PickNodes(
            rows=torch.tensor([0]),
            positions=torch.tensor([1]),
            num_output=torch.tensor([0]),
            path_tokens=torch.empty(1, 0, dtype=torch.int64),
            allowed=None,
            host_rows=[0],
        )
        assert choose(logits, nodes, table).tokens.tolist() == [want]
        assert choose_host(logits, nodes, table).tokens.tolist() == [want]


def test_bans_of_many_stop_ids_end_with_their_row() -> None:
    """Stop ids beyond the device's columns are bits of a row: the next request must not inherit them."""
    size = 100
    table = SamplingTable(3, size, "cpu", 0)
    nodes = PickNodes(
        rows=torch.tensor([0, 1, 2]),
        positions=torch.tensor([1, 1, 1]),
        num_output=torch.tensor([0, 0, 4]),
        path_tokens=torch.empty(3, 0, dtype=torch.int64),
        allowed=None,
        host_rows=[0, 1, 2],
    )
    early = SamplingParams(temperature=0.0, min_tokens=3)

    def picked(stops: list[range]) -> list[list[int]]:
        for row, ids in enumerate(stops):
            table.assign(
                row,
                early,
                seed=0,
                sample_index=0,
                prompt_ids=[0],
                output_ids=[],
                stop_ids=ids,
                limit=99,
            )
        logits = torch.arange(size, dtype=torch.float32).repeat(3, 1)
        return [way(logits, nodes, table).tokens.tolist() for way in (choose, choose_host)]

    # The third row has emitted enough; ids beyond the vocabulary are no tokens.
    assert picked([range(60, 300), range(99, 100), range(60, 300)]) == [[59, 98, 99]] * 2
    assert table.in_play([0]) == opt.MIN_TOKENS | opt.FAR_STOPS
    assert picked([range(99, 100), range(30, 100), range(5)]) == [[98, 29, 99]] * 2
    assert picked([range(98, 100)] * 3) == [[97, 97, 99]] * 2
    assert table.in_play([0, 1, 2]) == opt.MIN_TOKENS


def test_neutral_options_change_no_bit() -> None:
    """A plain row in a batch with penalties must be the plain row it is alone."""
    table = SamplingTable(2, V, "cpu", 2)
    every = SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1,
        frequency_penalty=1,
        logit_bias={0: 5.0},
        banned_token_ids=[3],
        min_tokens=9,
    )
    for row, params in enumerate((every, SamplingParams(temperature=1.0))):
        table.assign(
            row,
            params,
            seed=0,
            sample_index=0,
            prompt_ids=[1, 2],
            output_ids=[4],
            stop_ids=[5],
            limit=99,
        )
    logits = torch.randn(2, V) * 3
    nodes = PickNodes(
        rows=torch.tensor([1, 0]),
        positions=torch.tensor([4, 4]),
        num_output=torch.tensor([2, 2]),
        path_tokens=torch.tensor([[7, 8], [7, -1]]),
        allowed=None,
        host_rows=[0, 1],
    )
    assert torch.equal(processed(logits, nodes, table)[0], logits[0])


def test_flags_name_what_is_in_play() -> None:
    """The host decides by these what a step computes: a missing flag would drop an option."""
    cases = [
        (SamplingParams(temperature=0), 0),
        (SamplingParams(), opt.NOISE),
        (SamplingParams(top_p=0.9), opt.NOISE | opt.TOP_P),
        (SamplingParams(top_k=-1), opt.NOISE),
        (SamplingParams(top_k=3, min_p=0.1), opt.NOISE | opt.TOP_K | opt.MIN_P),
        (SamplingParams(temperature=0, top_p=0.9, top_k=3, min_p=0.1), 0),
        (SamplingParams(temperature=0, repetition_penalty=1.1), opt.PENALTY),
        (SamplingParams(temperature=0, presence_penalty=-0.1), opt.PENALTY),
        (SamplingParams(temperature=0, frequency_penalty=0.1), opt.PENALTY),
        (SamplingParams(temperature=0, min_tokens=1), opt.MIN_TOKENS),
        (SamplingParams(temperature=0, allowed_token_ids=[1]), opt.MASK),
        (SamplingParams(temperature=0, banned_token_ids=[1]), opt.MASK),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}), opt.BIAS),
    ]
    table = SamplingTable(1, V, "cpu", 1)
    for params, want in cases:
        table.assign(
            0, params, seed=0, sample_index=0, prompt_ids=[0], output_ids=[], stop_ids=[1], limit=9
        )
        assert table.in_play([0]) == want
        table.release(0)
        assert table.in_play([0]) == 0
