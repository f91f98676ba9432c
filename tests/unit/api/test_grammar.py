from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import pytest

from paceline.api.grammar import ConstraintError, Constraints
from paceline.api.tokenizer import Tokenizer
from paceline.core.request import Grammar
from tests import grammars, tiny_tokenizers

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}
TOKENIZERS = {"bytes": tiny_tokenizers.byte_level, "sentencepiece": tiny_tokenizers.sentencepiece}
WORD = 32  # a full last word is a border of its own; `grammars.VOCABULARY` fills none


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A tiny tokenizer of each kind."""
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    """For a model whose vocabulary is padded."""
    return Constraints(tokenizer, padded(tokenizer))


def padded(tokenizer: Tokenizer) -> int:
    """A vocabulary that has ids beyond the tokenizer's, as models' do, and fills whole words of a mask."""
    return tokenizer.vocab_size + WORD - tokenizer.vocab_size % WORD


def allowed(grammar: Grammar, vocab_size: int) -> set[int]:
    """Ids that a mask allows, read bit by bit."""
    mask = grammar.mask()
    assert len(mask) == 4 * -(-vocab_size // 32)
    bits = int.from_bytes(mask, "little")
    assert bits >> vocab_size == 0, "an id that the model does not have"
    return {t for t in range(vocab_size) if bits >> t & 1}


def taken(grammar: Grammar, vocab_size: int) -> set[int]:
    """Ids that `advance` takes, each taken back."""
    found = set()
    for token in range(vocab_size):
        if grammar.advance(token):
            found.add(token)
            grammar.rollback(1)
    return found


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text as it stands within a longer one."""
    return [
        next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))
        for byte in text.encode()
    ]


@pytest.mark.parametrize("name", grammars.PATTERNS)
def test_masks_are_the_language(name: str) -> None:
    """A token is allowed where some answer goes on with it; the end where the text is an answer."""
    draw, size = random.Random(name), grammars.VOCABULARY
    state, text, words = grammars.constraint(name).start(), "", grammars.tokenizer()
    for _ in range(25):
        mask = allowed(state, size)
        forced = list(state.forced())
        if forced:  # spelled in another way it would be the same text
            assert mask == {forced[0]} <= taken(state, size)
        else:
            assert mask == taken(state, size), "advance and mask disagree"
        assert (2 in mask) == (re.fullmatch(grammars.PATTERNS[name], text) is not None)
        assert not mask & {0, 1}, "special tokens are no text"
        others = sorted(mask - {2})
        if not others:
            assert re.fullmatch(grammars.PATTERNS[name], text)
            return
        token = draw.choice(others)
        assert state.advance(token)
        text += words.token_bytes(token).decode()
    assert name != "form", "it ends before"


def test_masks_by_brute_force(tokenizer: Tokenizer, constraints: Constraints) -> None:
    """Of a finite language the mask is known: every token that begins what is left of some text."""
    texts = ["the fox", "the quick fox.", "then 12", 'x"\\n', "the"]
    size = padded(tokenizer)
    state = constraints.choice(texts).start()
    draw, so_far = random.Random(0), b""
    for _ in range(30):
        left = [t.encode()[len(so_far) :] for t in texts if t.encode().startswith(so_far)]
        wanted = {
            i
            for i in range(tokenizer.vocab_size)
            if i not in tokenizer.special_ids
            and tokenizer.token_bytes(i)
            and any(rest.startswith(tokenizer.token_bytes(i)) for rest in left)
        }
        if b"" in left:
            wanted |= set(tokenizer.eos_token_ids)
        forced = list(state.forced())
        if forced:
            assert allowed(state, size) == {forced[0]} <= wanted
        else:
            assert allowed(state, size) == wanted
        token = draw.choice(sorted(wanted))
        assert state.advance(token)
        if token in tokenizer.eos_token_ids:
            assert allowed(state, size) == set(tokenizer.eos_token_ids)
            return
        so_far += tokenizer.token_bytes(token)
    pytest.fail("an answer ends")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_rollback_is_as_if_nothing_had_been(constraints: Constraints, ignore_eos: bool) -> None:
    """Forth and back at random, ends included: the state is that of the tokens that are left."""
    draw = random.Random(3)
    size = len(constraints.json_object().start().mask()) * 8
    built = constraints.json_schema(PERSON, whitespace="spaced")
    state = built.start(ignore_eos=ignore_eos)
    tokens: list[int] = []
    seen_ends = 0
    for _ in range(400):
        if tokens and draw.random() < 0.45:
            count = draw.randrange(1, min(len(tokens), 9) + 1)
            state.rollback(count)
            del tokens[-count:]
        else:
            mask = sorted(allowed(state, size))
            ends = [t for t in mask if t in constraints.eos_token_ids]
            token = draw.choice(ends or mask)
            seen_ends += bool(ends)
            assert state.advance(token)
            tokens.append(token)
        fresh = built.start(ignore_eos=ignore_eos)
        assert all(fresh.advance(t) for t in tokens)
        assert state.mask() == fresh.mask()
        assert list(state.forced()) == list(fresh.forced())
    state.rollback(len(tokens))
    assert state.mask() == built.start().mask()


def test_the_end_is_taken_back(tokenizer: Tokenizer, constraints: Constraints) -> None:
    """After an end nothing but an end may follow; taken back, the text goes on."""
    state = constraints.regex("a{1,3}").start()
    (a,), eos, size = (
        ids_of(tokenizer, "a"),
        tokenizer.eos_token_ids[0],
        padded(tokenizer),
    )
    assert not state.advance(eos), "an empty text is no answer"
    assert state.advance(a)
    assert {a, eos} <= allowed(state, size)
    assert state.advance(eos)
    assert allowed(state, size) == {eos}
    assert not state.advance(a)
    assert state.advance(eos)
    assert state.forced() == ()
    state.rollback(2)
    assert state.advance(a)
    assert state.advance(a)
    assert allowed(state, size) == {eos}, "three are the most"
    state.rollback(3)
    assert eos not in allowed(state, size)


def test_every_end_of_text_ends(tokenizer: Tokenizer) -> None:
    """Models with an end of turn beside the end of text: the grammar's end allows both, nothing else does."""
    size = padded(tokenizer)
    ends = (
        *tokenizer.eos_token_ids,
        tokenizer.vocab_size + 2,
        size + 50,
    )  # the last does not exist
    state = Constraints(tokenizer, size, ends).regex("ab?").start()
    a, b = ids_of(tokenizer, "ab")
    assert not allowed(state, size) & set(ends)
    assert state.advance(a)
    assert allowed(state, size) >= {*ends[:-1], b}
    assert state.advance(ends[1])
    assert allowed(state, size) == set(ends[:-1])


def test_ignore_eos_ends_where_nothing_else_is_left(constraints: Constraints) -> None:
    """`ignore_eos` goes on as long as the grammar can, and ends with it."""
    tokenizer = constraints.eos_token_ids
    built = constraints.regex("[ab]{1,4}")
    size = len(built.start().mask()) * 8
    for ignore in (False, True):
        state, steps = built.start(ignore_eos=ignore), 0
        while not allowed(state, size) & set(tokenizer):
            assert not state.advance(tokenizer[0])
            assert state.advance(min(allowed(state, size)))
            steps += 1
        assert (steps > 1) == ignore
        assert state.advance(tokenizer[0])


def test_forced_tokens_spell_what_must_come(tokenizer: Tokenizer, constraints: Constraints) -> None:
    """Where the bytes are known so are likely tokens: allowed one after the other, without a made-up space."""
    state = constraints.json_schema(PERSON, whitespace="compact").start()
    forced = list(state.forced())
    spelled = b"".join(tokenizer.token_bytes(i) for i in forced)
    assert len(forced) > 3
    assert b'{"name":"'.startswith(spelled)
    size = padded(tokenizer)
    for token in forced:
        assert allowed(state, size) == {token}, "nothing else may come"
        assert state.advance(token)
    assert list(constraints.regex("[a-z]+").start().forced()) == []


def test_another_spelling_of_a_forced_run(tokenizer: Tokenizer, constraints: Constraints) -> None:
    """Who spells a forced run byte by byte is not told to go on as if by whole tokens."""
    built = constraints.choice(["the quick fox", "the quick dog"])
    ids = ids_of(tokenizer, "the quick fo")
    state = built.start()
    for i, token in enumerate(ids):
        fresh = built.start()
        assert all(fresh.advance(t) for t in ids[:i])
        assert list(state.forced()) == list(fresh.forced())
        assert state.mask() == fresh.mask()
        assert state.advance(token)
    for count in (1, 3, 4):  # and back, over states that were forced and some that were not
        state.rollback(count)
        del ids[-count:]
        fresh = built.start()
        assert all(fresh.advance(t) for t in ids)
        assert state.mask() == fresh.mask()


def test_states_are_independent(constraints: Constraints) -> None:
    """n samples share a constraint; what one takes the others do not see."""
    built = constraints.json_schema(PERSON, whitespace="compact")
    one, other = built.start(), built.start()
    before = other.mask()
    assert one.advance(one.forced()[0])
    assert other.mask() == before != one.mask()


def test_whitespace(constraints: Constraints, tokenizer: Tokenizer) -> None:
    """Three layouts of the same JSON; the flexible one ends a run of blanks."""
    made = {
        "compact": '{"name":"fox","number":12}',
        "spaced": '{"name": "fox", "number": 12}',
        "flexible": '{\n  "name" : "fox",\n\t"number": 12\n}',
    }
    for layout, text in made.items():
        for other in made:
            state = constraints.json_schema(PERSON, whitespace=other).start()
            fits = all(state.advance(i) for i in ids_of(tokenizer, text))
            assert fits == (other in {layout, "flexible"})
    state = constraints.json_object().start()
    (brace, space) = ids_of(tokenizer, "{ ")
    assert state.advance(brace)
    blanks = 0
    while state.advance(space):
        blanks += 1
    assert blanks == 64
    with pytest.raises(ConstraintError, match="flexible, spaced, compact"):
        constraints.json_schema(PERSON, whitespace="loose")  # type: ignore[arg-type]
    own = Constraints(tokenizer, padded(tokenizer), whitespace="compact")
    for built, blank in (
        (own.json_object(), False),
        (own.json_object(whitespace="flexible"), True),
    ):
        state = built.start()
        assert state.advance(brace)
        assert state.advance(space) == blank


@pytest.mark.parametrize(
    "text, good, bad",
    [
        ('start: "a" INT\nINT: /[0-9]+/', ["a1", "a22"], ["a", "1"]),
        ('root ::= "a" [0-9]+ | thing\nthing ::= "b"', ["a1", "b"], ["a", "c"]),
        ("root ::= thing{2}\nthing ::= [ab]", ["ab", "bb"], ["a", "abc"]),
    ],
)
def test_context_free_grammars(
    constraints: Constraints,
    tokenizer: Tokenizer,
    text: str,
    good: Sequence[str],
    bad: Sequence[str],
) -> None:
    """Lark and GBNF, told apart by themselves."""
    for texts, right in ((good, True), (bad, False)):
        for each in texts:
            state = constraints.lark(text).start()
            ids = [*ids_of(tokenizer, each), tokenizer.eos_token_ids[0]]
            assert all(state.advance(i) for i in ids) == right


def test_choices_of_all_kinds(constraints: Constraints, tokenizer: Tokenizer) -> None:
    """Quotes, controls, scripts: a choice is its text, not a pattern."""
    texts = ['a"b\\c/', "\x01\t\n", "é—你", "[0-9]+", "%json", "", "a b"]
    for text in texts:
        state = constraints.choice(texts).start()
        assert all(state.advance(i) for i in ids_of(tokenizer, text))
        assert state.advance(tokenizer.eos_token_ids[0])


def test_schemas_are_read_as_text_too(constraints: Constraints) -> None:
    """An OpenAI client passes an object, a command line its text."""
    one = constraints.json_schema(PERSON).start()
    other = constraints.json_schema(json.dumps(PERSON)).start()
    assert one.mask() == other.mask()
    constraints.json_schema(True)
    assert "type" in PERSON, "a caller's schema is not changed"
