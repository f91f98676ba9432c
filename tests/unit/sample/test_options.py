from __future__ import annotations

import pytest
import torch

from paceline.core.errors import RequestError
from paceline.core.request import SamplingParams
from paceline.sample.options import PENALTY, SamplingTable

V = 50


def assign(table: SamplingTable, row: int, params: SamplingParams, **kw: object) -> None:
    given: dict[str, object] = {
        "seed": 3,
        "sample_index": 0,
        "prompt_ids": [1, 2],
        "output_ids": [],
        "stop_ids": [],
        "limit": 20,
    }
    table.assign(row, params, **(given | kw))


def state(table: SamplingTable, row: int) -> dict[str, object]:
    """Everything that a step could read about a row."""
    slot = int(table.slot[row])
    slots = table.slots
    return {
        "host": table.host(row),
        "floats": table._floats.tensor[row].tolist(),
        "ints": [x for i, x in enumerate(table._ints.tensor[row].tolist()) if i != 5],
        "stops": table.stop_ids[row].tolist(),
        "live": bool(table.live[row]),
        "beyond": table.host_stop_ids.get(row),
        "bans": [b.tolist() for b in table.bans(row)],
        "counts": slots.counts[slot].tolist(),
        "prompt": slots.in_prompt[slot].tolist(),
        "banned": slots.banned[slot].tolist(),
        "bias": (slots.bias_ids[slot].tolist(), slots.bias_values[slot].tolist()),
        "num_bias": slots.num_bias[slot],
    }


def test_a_slot_is_needed_only_by_options_as_wide_as_the_vocabulary() -> None:
    """Slots are few: a row that takes one without need makes others wait."""
    wide = [
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(allowed_token_ids=[1]),
        SamplingParams(banned_token_ids=[1]),
    ]
    narrow = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, min_tokens=4, seed=1, logprobs=3
    )
    assert all(SamplingTable.needs_slot(p) for p in wide)
    assert not SamplingTable.needs_slot(narrow)


def test_admission_waits_for_a_slot_and_release_frees_it() -> None:
    """A leaked slot would block requests with penalties for ever."""
    table = SamplingTable(3, V, "cpu", 1)
    wide, narrow = SamplingParams(presence_penalty=1), SamplingParams()
    assert table.has_slot(wide)
    assign(table, 0, wide)
    assert not table.has_slot(wide)
    assert table.has_slot(narrow)
    assign(table, 1, narrow)
    table.release(1)
    assert not table.has_slot(wide)
    table.release(0)
    table.release(0)
    assert table.slots.num_free == 1
    assign(table, 2, wide)
    assign(table, 2, wide)
    assert table.slots.num_free == 0


def test_a_released_row_and_its_slot_keep_nothing() -> None:
    """The next request in the row must not inherit counts, bans, biases, stops or a seed."""
    loud = SamplingParams(
        temperature=0.3,
        top_p=0.1,
        top_k=1,
        min_p=0.2,
        repetition_penalty=2,
        presence_penalty=1,
        frequency_penalty=1,
        logit_bias={5: 3.0, 0: -1.0},
        allowed_token_ids=[1, 2, 3],
        banned_token_ids=[3],
        min_tokens=3,
        logprobs=4,
    )
    used, fresh = SamplingTable(1, V, "cpu", 1), SamplingTable(1, V, "cpu", 1)
    assign(used, 0, loud, output_ids=[7, 7], stop_ids=range(1, 30))
    used.commit(torch.tensor([0]), torch.tensor([[9, -1]]), [0])
    used.release(0)
    assert not used.live.any()
    assert state(used, 0) == state(fresh, 0)
    for params in (SamplingParams(presence_penalty=0.5), SamplingParams()):
        assign(used, 0, params)
        assign(fresh, 0, params)
        assert state(used, 0) == state(fresh, 0)


def test_counts_grow_by_what_is_emitted_and_are_rebuilt_after_preemption() -> None:
    """A resumed request must be penalised for everything that it said before."""
    table = SamplingTable(3, V, "cpu", 2)
    wide = SamplingParams(frequency_penalty=1)
    assign(table, 0, wide, output_ids=[4])
    assign(table, 1, SamplingParams())
    assign(table, 2, wide, output_ids=[5])
    emitted = torch.tensor([[0, 0, 9], [6, 6, 6], [8, -1, -1], [-1, -1, -1]])
    table.commit(torch.tensor([0, 1, 2, 3]), emitted, [0, 1, 2])
    assign(table, 1, wide, output_ids=[4, 0, 0, 9]) if table.has_slot(wide) else None
    counts = table.slots.counts
    zero = table.slots.counts[int(table.slot[0])]
    assert {t: int(c) for t, c in enumerate(zero) if c} == {0: 2, 4: 1, 9: 1}
    two = counts[int(table.slot[2])]
    assert {t: int(c) for t, c in enumerate(two) if c} == {5: 1, 8: 1}
    assert not counts[2].any(), "the spare slot stays neutral"
    table.release(2)
    assign(table, 1, wide, output_ids=[4, 0, 0, 9])
    assert torch.equal(counts[int(table.slot[1])], zero)
    prompt = table.slots.in_prompt[int(table.slot[1])].nonzero().view(-1)
    assert prompt.tolist() == [1, 2]


def test_plain_rows_commit_for_free() -> None:
    """A step without penalties must not touch vocabulary-sized memory."""
    table = SamplingTable(2, V, "cpu", 1)
    assign(table, 0, SamplingParams())
    assign(table, 1, SamplingParams(logit_bias={1: 1.0}))
    assert not table.in_play([0, 1]) & PENALTY
    table.commit(torch.tensor([0, 1]), torch.tensor([[3], [4]]), [0, 1])
    assert not table.slots.counts.any()


def test_ends_at_stop_ids_and_at_the_limit() -> None:
    """One token late would show an end-of-text token, or run past the context window."""
    table = SamplingTable(2, V, "cpu", 0)
    assign(table, 0, SamplingParams(), stop_ids=[0, 7], limit=20)
    rows = torch.tensor([0] * 6)
    tokens = torch.tensor([7, 0, 3, 3, 3, 3])
    known = torch.tensor([5, 5, 5, 19, 20, 21])
    assert table.ends(rows, tokens, known).tolist() == [True, True, False, False, True, True]


def test_stop_ids_beyond_the_devices_are_told_to_the_host() -> None:
    """A long stop list may be checked late, but never dropped."""
    table = SamplingTable(1, V, "cpu", 0)
    assign(table, 0, SamplingParams(min_tokens=2), stop_ids=[*range(10, 30), 10, 900])
    assert table.stop_ids[0].tolist() == list(range(10, 26))
    assert table.host_stop_ids == {0: frozenset([26, 27, 28, 29, 900])}
    assert [b.tolist() for b in table.bans(0)] == [list(range(10, 26)), [26, 27, 28, 29]]
    table.release(0)
    assert not table.host_stop_ids
    assert table.bans(0) == []


def test_the_seed_and_the_sample_index_make_the_key() -> None:
    """The n samples of one prompt differ; the same request elsewhere is the same."""
    table = SamplingTable(4, V, "cpu", 0)
    for row, (seed, index) in enumerate([(1, 0), (1, 1), (2, 0), (1, 0)]):
        assign(table, row, SamplingParams(), seed=seed, sample_index=index)
    keys = table.key[:4].tolist()
    assert len(set(keys[:3])) == 3
    assert keys[3] == keys[0]


@pytest.mark.parametrize(
    "params, words",
    [
        (SamplingParams(logit_bias={V: 1.0}), "logit_bias names token 50"),
        (SamplingParams(allowed_token_ids=[3, -1]), "allowed_token_ids names token -1"),
        (SamplingParams(banned_token_ids=[99]), "banned_token_ids names token 99"),
        (SamplingParams(allowed_token_ids=[3, 4], banned_token_ids=[4, 3, 5]), "bans every token"),
        (SamplingParams(banned_token_ids=range(V)), "bans every token"),
    ],
)
def test_impossible_options_are_refused(params: SamplingParams, words: str) -> None:
    """Refused by name when the request is added, not met as a crash or a wrong token later."""
    table = SamplingTable(1, V, "cpu", 1)
    with pytest.raises(RequestError, match=words):
        table.check(params)
    table.check(SamplingParams(allowed_token_ids=[3], banned_token_ids=[4], logit_bias={49: 1.0}))


def test_options_that_no_slot_can_ever_serve_are_refused() -> None:
    """Without slots such a request would wait for ever."""
    with pytest.raises(RequestError, match="option slot"):
        SamplingTable(1, V, "cpu", 0).check(SamplingParams(presence_penalty=1))
    SamplingTable(1, V, "cpu", 0).check(SamplingParams())


def test_a_step_can_be_recorded_for_options_that_nobody_has() -> None:
    """The spare row stands for them, within the context and on the host alone."""
    table = SamplingTable(2, 50, "cpu", 1)
    assign(table, 0, SamplingParams(temperature=0.0))
    before = state(table, 2)
    with table.in_play_as(PENALTY, 3) as rows:
        assert table.in_play(rows) == PENALTY
        assert table.num_logprobs(rows) == 3
        assert table.in_play([0, 1]) == 0
        assert {**state(table, 2), "host": None} == {**before, "host": None}
    assert table.in_play([*rows, 0, 1]) == 0
    assert state(table, 2) == before
