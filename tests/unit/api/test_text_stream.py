from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.api.stop_strings import StopStrings
from paceline.api.text_stream import TextStream
from paceline.api.tokenizer import Tokenizer
from paceline.core.request import SamplingParams, Stopper
from tests import tiny_tokenizers


@functools.cache
def byte_level() -> Tokenizer:
    return tiny_tokenizers.byte_level()


@functools.cache
def sentencepiece() -> Tokenizer:
    return tiny_tokenizers.sentencepiece()


def pieces(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """`ids` cut into steps."""
    borders = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [list(ids[start:end]) for start, end in itertools.pairwise(borders)]


def run(stream: TextStream, steps: Sequence[Sequence[int]]) -> tuple[str, int | None]:
    """Feed steps; return the shown text and how many tokens are kept in all, None without a stop.

    Checks on the way that text is only ever added.
    """
    shown, done = "", 0
    for step in steps:
        kept = stream.feed(step)
        shown += stream.take()
        assert stream.text == shown
        if kept is not None:
            assert 0 <= kept <= len(step)
            assert stream.finish() == ""
            assert stream.text == shown
            return shown, done + kept
        done += len(step)
    shown += stream.finish()
    assert stream.text == shown
    return shown, None


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the first complete stop string is: start and end."""
    for end in range(1, len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(ending), end
    return None


ANY_IDS = st.lists(st.integers(0, byte_level().vocab_size - 1), max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=5)


@given(ids=ANY_IDS, cuts=CUTS, skip=st.booleans(), searching=st.booleans())
def test_streamed_text_is_the_decoded_text(
    ids: list[int], cuts: list[int], skip: bool, searching: bool
) -> None:
    """Any ids, however cut into steps, stream to what decoding them at once gives: broken UTF-8 too."""
    stop = ("never in the text",) if searching else ()
    stream = TextStream(byte_level(), stop=stop, skip_special_tokens=skip)
    assert run(stream, pieces(ids, cuts)) == (byte_level().decode(ids, skip), None)


@given(text=st.text(), cuts=CUTS)
def test_sentencepiece_text_streams_whole(text: str, cuts: list[int]) -> None:
    """Byte-fallback characters and dropped spaces stream as they decode."""
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert run(TextStream(tokenizer), pieces(ids, cuts)) == (tokenizer.decode(ids), None)


@given(
    text=st.text("ab c", min_size=1, max_size=20) | st.text(min_size=1, max_size=12),
    data=st.data(),
    include=st.booleans(),
)
def test_a_stop_does_not_depend_on_the_steps(text: str, data: st.DataObject, include: bool) -> None:
    """Cut at every position, the same text and the same number of tokens are kept, and it is right."""
    parts = [text[i:j] for i in range(len(text)) for j in range(i + 1, min(i + 5, len(text)) + 1)]
    stops = data.draw(st.lists(st.sampled_from(parts) | st.text("ab c", min_size=1), min_size=1))
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = first_stop(text, stops)
    if found is None:
        expected: tuple[str, int | None] = (text, None)
    else:
        start, end = found
        kept = next(n for n in range(len(ids) + 1) if has_prefix(ids[:n], text[:end]))
        expected = (text[: end if include else start], kept)
    every_cut = [[cut] for cut in range(len(ids) + 1)]
    for cuts in [*every_cut, range(len(ids))]:
        stream = TextStream(tokenizer, stop=stops, include_stop=include)
        assert run(stream, pieces(ids, cuts)) == expected
        if found is not None:
            assert stream.stop_string == text[found[0] : found[1]]


def has_prefix(ids: Sequence[int], text: str) -> bool:
    """Whether the bytes of these tokens begin with the bytes of `text`."""
    data = b"".join(byte_level().token_bytes(token_id) for token_id in ids)
    return data.startswith(text.encode())


def feed_text(stream: TextStream, text: str) -> list[str]:
    """Feed a text byte by byte; what is shown after each."""
    ids = [id_of(byte) for byte in text.encode()]
    shown = []
    for token_id in ids:
        stream.feed([token_id])
        shown.append(stream.take())
    return shown


def id_of(byte: int) -> int:
    tokenizer = byte_level()
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def test_only_what_could_become_a_stop_is_held() -> None:
    """Text is shown at once, except an end that may be the beginning of a stop string."""
    stream = TextStream(byte_level(), stop=["END", "Nothing"])
    assert feed_text(stream, "xENxEND")[:5] == ["x", "", "", "ENx", ""]
    assert stream.text == "xENx"
    assert stream.stop_string == "END"


def test_incomplete_characters_are_held_and_flushed() -> None:
    """Half a character is never shown; at the end it becomes U+FFFD."""
    stream = TextStream(byte_level())
    assert feed_text(stream, "é👋") == ["", "é", "", "", "", "👋"]
    stream.feed([id_of(0xE2), id_of(0x82)])
    assert stream.take() == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert stream.text == "é👋\ufffd"


def test_a_held_beginning_is_flushed_at_the_end() -> None:
    """An answer that ends in half a stop string keeps it."""
    stream = TextStream(byte_level(), stop=["</answer>"])
    assert "".join(feed_text(stream, "42</ans")) == "42"
    assert stream.finish() == "</ans"


def test_a_stop_is_found_at_its_own_token() -> None:
    """A token with the stop string and half a character completes it, not the token after that."""
    metadata = tiny_tokenizers.byte_level_metadata()
    space_and_lead = (
        "Ġ\u00d0"  # " " and the first byte of a Cyrillic letter, a token of real models
    )
    metadata["tokenizer.ggml.tokens"].append(space_and_lead)
    metadata["tokenizer.ggml.token_type"].append(tiny_tokenizers.NORMAL)
    metadata["tokenizer.ggml.merges"].append("Ġ \u00d0")
    tokenizer = tiny_tokenizers.Tokenizer(tiny_tokenizers.read_gguf(metadata))
    last = tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(last) == b" \xd0"
    stream = TextStream(tokenizer, stop=[" "])
    assert stream.feed([id_of(ord("a")), last, id_of(0x9F)]) == 2
    assert stream.finish() == "a"
    shown = TextStream(tokenizer, stop=["never"])
    assert shown.feed([last]) is None
    assert shown.feed([id_of(0x9F)]) is None
    assert shown.finish() == " П"


@pytest.mark.parametrize(
    "stops,text,stop",
    [
        (["abc", "b"], "x", "b"),  # complete first, though it begins later
        (["bc", "abc", "c"], "x", "abc"),  # complete together: the longest
        (["zz", "abcd"], "x", "abcd"),
    ],
)
def test_the_first_complete_stop_wins(stops: list[str], text: str, stop: str) -> None:
    """Neither the order of the list nor the tokens decide, the text does."""
    for order in itertools.permutations(stops):
        stream = TextStream(byte_level(), stop=order)
        feed_text(stream, "xabcdzz")
        assert (stream.text, stream.stop_string) == ("xa" if stop == "b" else text, stop)


def test_nothing_is_kept_after_a_stop() -> None:
    """Tokens of a step that was under way when the stop was found never count."""
    tokenizer = byte_level()
    stream = TextStream(tokenizer, stop=["."])
    ids = tokenizer.encode("Done. More text.", add_special_tokens=False)
    kept = stream.feed(ids)
    assert kept is not None
    assert tokenizer.decode(ids[:kept]) == "Done."
    assert stream.feed(ids) == 0
    assert stream.finish() == "Done"


def test_the_prompt_is_not_searched() -> None:
    """A stop string in the prompt, or half in it, does not stop the answer."""
    tokenizer = byte_level()
    prompt = tokenizer.encode("Q: what?\nQ", add_special_tokens=False)
    answer = tokenizer.encode(": the fox", add_special_tokens=False)
    stream = TextStream(tokenizer, prompt, stop=["Q:"])
    assert stream.feed(answer) is None
    assert stream.finish() == ": the fox"


def test_the_prompt_is_context_for_the_first_token() -> None:
    """SentencePiece drops a text's first space; an answer's first space is inside a text."""
    tokenizer = sentencepiece()
    prompt = tokenizer.encode("the quick")
    ids = tokenizer.encode("the fox", add_special_tokens=False)[-1:]
    stream = TextStream(tokenizer, prompt)
    stream.feed(ids)
    assert stream.finish() == " fox"
    alone = TextStream(tokenizer)
    alone.feed(ids)
    assert alone.finish() == "fox"


def test_a_prompt_cut_inside_a_character_stays_out() -> None:
    """A prompt of token ids may end in half a character: none of the prompt is shown."""
    stream = TextStream(byte_level(), [id_of(ord("p")), id_of(0xF0), id_of(0x9F)])
    stream.feed([id_of(0x91), id_of(0x8B), id_of(ord("a"))])
    assert stream.finish() == "\ufffd\ufffda"


def test_special_tokens_are_skipped_or_shown() -> None:
    """`skip_special_tokens` decides whether special tokens are part of the text."""
    tokenizer = byte_level()
    ids = [0, *tokenizer.encode("fox", add_special_tokens=False), 1]
    for skip, text in ((True, "fox"), (False, "<s>fox</s>")):
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        stream.feed(ids)
        assert stream.finish() == text


@pytest.mark.parametrize("include,text", [(False, "fox"), (True, "fox</s>")])
@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_can_be_a_stop_string(include: bool, text: str, skip: bool) -> None:
    """A stop string that names a special token works although the token is not shown."""
    tokenizer = byte_level()
    ids = [*tokenizer.encode("fox", add_special_tokens=False), 1, 5]
    stream = TextStream(tokenizer, stop=["</s>"], include_stop=include, skip_special_tokens=skip)
    assert stream.feed(ids) == len(ids) - 1
    assert stream.stop_string == "</s>"
    assert stream.finish() == text


def test_a_special_stop_flushes_what_was_held() -> None:
    """Text held back before a special stop token is shown: no other stop string came of it."""
    stream = TextStream(byte_level(), stop=["xyz", "</s>"])
    ids = [id_of(ord("a")), id_of(ord("x")), id_of(0xE2), 1]
    assert stream.feed(ids) == 4
    assert stream.finish() == "ax\ufffd"


def test_min_tokens_defers_special_stops() -> None:
    """Special stop tokens wait for min_tokens as other stop strings do."""
    stream = TextStream(byte_level(), stop=["</s>"], min_tokens=2)
    assert stream.feed([id_of(ord("a")), 1, id_of(ord("b")), 1, 5]) == 4
    assert stream.finish() == "ab"


def test_min_tokens_defers_stops() -> None:
    """A stop string complete within the first min_tokens tokens is text like any other."""
    tokenizer = byte_level()
    ids = [id_of(byte) for byte in b"a.b.c"]
    for min_tokens, kept, text in ((0, 2, "a"), (1, 2, "a"), (2, 4, "a.b"), (4, None, "a.b.c")):
        stream = TextStream(tokenizer, stop=["."], min_tokens=min_tokens)
        assert run(stream, [ids]) == (text, kept)


def test_ids_without_a_token_have_no_text() -> None:
    """A model's vocabulary may be padded beyond the tokenizer's; such ids do no harm."""
    tokenizer = byte_level()
    stream = TextStream(tokenizer, stop=["x"])
    assert stream.feed([tokenizer.vocab_size + 5, id_of(ord("a"))]) is None
    assert stream.finish() == "a"


def test_bytes_that_change_earlier_text_do_not_break_the_stream() -> None:
    """SentencePiece decodes a run of bytes as a whole; a bad run after good text is survived."""
    tokenizer = sentencepiece()
    ids = [tokenizer.backend.token_to_id(t) for t in ("<0x41>", "<0xE2>", "▁fox", "▁dog")]
    for stop in ((), ("never",)):
        stream = TextStream(tokenizer, stop=stop)
        for token_id in ids:
            stream.feed([token_id])
        stream.finish()
        assert stream.text == "A\ufffd fox dog"


def test_each_character_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred stop strings cost one look-up per character, not a search through the text."""
    looked = 0
    advance = StopStrings.advance

    def counting(self: StopStrings, state: int, char: str) -> int:
        nonlocal looked
        looked += 1
        return advance(self, state, char)

    stops = [f"stop number {i}" for i in range(100)]
    stream = TextStream(byte_level(), stop=stops)
    monkeypatch.setattr(StopStrings, "advance", counting)
    text = "a stop number that never comes " * 20
    stream.feed(byte_level().encode(text, add_special_tokens=False))
    assert stream.finish() == text
    assert looked == len(text)


def test_a_request_gets_the_stream_its_params_ask_for() -> None:
    """All text options of SamplingParams arrive; the stream is the engine's Stopper."""
    params = SamplingParams(
        stop="b", include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=2
    )
    stopper: Stopper = TextStream.of_params(byte_level(), [0], params)
    ids = [0, id_of(ord("b")), id_of(ord("a")), id_of(ord("b")), id_of(ord("c"))]
    assert stopper.feed(ids) == 4
    assert isinstance(stopper, TextStream)
    assert stopper.finish() == "<s>bab"
