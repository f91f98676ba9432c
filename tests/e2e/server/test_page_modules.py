"""Parts of the page that can be tried alone, in a browser."""

from __future__ import annotations

from tests.browser import Page


def test_texts_that_differ_are_said_to(page: Page) -> None:
    """A check that cannot fail shows nothing."""
    script = """
        const done = arguments[arguments.length - 1];
        import("./page/words.js").then(({ comparison }) => {
          const made = (ids) => ({ drafter: "a", isWhole: true, text: ids.join(" "),
            tokens: ids.map((id) => ({ id })), timings: null });
          const cut = { ...made([1]), isWhole: false };
          done([comparison([made([1, 2]), made([1, 3])]), comparison([made([1]), made([1, 2])]),
            comparison([made([1, 2]), made([1, 2])]), comparison([made([1]), cut])]);
        });
    """
    differs, longer, equal, cut = page.driver.execute_async_script(script)
    assert differs.startswith("The texts differ, from token 2 on")
    assert longer.startswith("The texts differ, from token 2 on")
    assert equal.startswith("The texts are equal")
    assert cut.startswith("Not compared")


def test_text_lands_on_its_tokens(page: Page) -> None:
    """Pieces of characters, tokens without text, text that lags: none of it is lost or doubled."""
    script = """
        const done = arguments[arguments.length - 1];
        import("./page/placing.js").then(({ Placing }) => done(arguments[0].map((parts) => {
          const placing = new Placing();
          const tokens = [];
          parts.forEach(([text, pieces], i) => {
            const fresh = pieces.map((piece) => ({ piece, text: "" }));
            tokens.push(...fresh);
            placing.take(text, fresh, i === parts.length - 1);
          });
          return tokens.map((token) => token.text);
        })));
    """
    half = "�"
    cases = [
        ([["ab", ["a", "b"]]], ["a", "b"]),
        ([["", [half]], ["é!", [half, "!"]]], ["é", "", "!"]),
        ([["", [half, half]], ["", [half]], ["🙂", [half]]], ["🙂", "", "", ""]),
        ([["a", ["a", "<|im_end|>"]]], ["a", ""]),
        ([["ab", ["a", "<s>", "b"]]], ["a", "", "b"]),
        ([["a", ["ab"]], ["bc", ["c"]]], ["ab", "c"]),  # held back for a stop string
        ([["a", ["ab"]]], ["a"]),  # cut by one
        ([["Hello", [" Hello"]], [" you", [" you"]]], ["Hello", " you"]),
    ]
    found = page.driver.execute_async_script(script, [parts for parts, _ in cases])
    assert found == [expected for _, expected in cases]
