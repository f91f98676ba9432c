from __future__ import annotations

import math

from paceline.api.results import Alternative, TokenLogprob
from paceline.api.server.logprobs import Offsets, TokenNames, chat_logprobs, completion_logprobs
from tests.served import TOKENIZER, ids

NAMES = TokenNames(TOKENIZER, as_ids=False)


def token(token_id: int, logprob: float = -1.0, top: tuple[tuple[int, float], ...] = ()):
    name = TOKENIZER.token_text
    return TokenLogprob(
        token_id=token_id,
        token=name(token_id),
        logprob=logprob,
        top=[Alternative(token_id=i, token=name(i), logprob=p) for i, p in top],
    )


def test_joined_bytes_are_the_text() -> None:
    """A token may hold a part of a character: its bytes say what its text cannot."""
    told = chat_logprobs([token(i) for i in ids("aé")], NAMES)["content"]
    assert [entry["token"] for entry in told] == ["a", "\ufffd", "\ufffd"]
    assert bytes(b for entry in told for b in entry["bytes"]).decode() == "aé"


def test_numbers_that_json_lacks_are_replaced() -> None:
    """As OpenAI and vLLM do."""
    told = chat_logprobs([token(5, -math.inf), token(5, math.nan)], NAMES)["content"]
    assert [entry["logprob"] for entry in told] == [-9999.0, -9999.0]


def test_offsets_point_into_the_text() -> None:
    """Also after characters of several tokens, and after tokens that the text leaves out."""
    text = "aéb"
    tokens = [token(i) for i in [*ids("a"), 2, *ids("éb")]]
    told = completion_logprobs(tokens, NAMES, Offsets(3, frozenset({2})))
    assert told["text_offset"] == [3, 4, 4, 4, 5]
    assert [("xyz" + text)[at] for at in told["text_offset"]] == ["a", "é", "é", "é", "b"]


def test_alternatives_hold_the_emitted_token() -> None:
    """OpenAI's do, beside the k likeliest; of two with one name the likelier counts."""
    half = ids("é")
    one = token(5, -4.0, ((half[0], -0.5), (half[1], -0.75), (6, -1.0)))
    told = completion_logprobs([one], NAMES, Offsets(0, frozenset()))
    assert told["top_logprobs"] == [{"\ufffd": -0.5, "d": -1.0, "c": -4.0}]


def test_tokens_may_be_called_by_their_ids() -> None:
    """vLLM's name, for those who feed them back."""
    names = TokenNames(TOKENIZER, as_ids=True)
    assert chat_logprobs([token(5)], names)["content"][0]["token"] == "token_id:5"
    told = completion_logprobs([token(5, top=((6, -1.0),))], names, Offsets(0, frozenset()))
    assert set(told["top_logprobs"][0]) == {"token_id:5", "token_id:6"}
