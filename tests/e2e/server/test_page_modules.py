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


def test_a_tree_is_drawn_with_its_branches(page: Page) -> None:
    """The path along the top, what was rejected below it, each node beside its parent and over none."""
    script = """
        const done = arguments[arguments.length - 1];
        import("./page/layout.js").then(({ layOut }) => {
          const { nodes, width, height, nodeHeight } = layOut(arguments[0]);
          const told = nodes.map((node) => ({
            text: node.text, kind: node.kind, parent: node.parent?.text ?? null,
            x: node.x, y: node.y, width: node.width,
          }));
          done([told, width, height, nodeHeight]);
        });
    """
    tree = {
        "tokens": ["In", " the", " a", " heart", "\n", " " * 40, "世界"],
        "parents": [-1, 0, 0, 1, 3, 1, 2],
        "sources": ["target", *["ddtree"] * 6],
        "scores": [0.0, -0.1, -0.2, -3.0, -3.1, -0.5, None],
        "path": [0, 1, 3],
        "emitted": [" the", " heart", " of"],
    }
    nodes, width, height, node_height = page.driver.execute_async_script(script, tree)
    found = {node["text"]: node for node in nodes}
    assert {text: node["kind"] for text, node in found.items()} == {
        "In": "root",
        "·the": "accepted",
        "·heart": "accepted",
        "·of": "own",
        "·a": "rejected",
        "⏎": "rejected",
        "·" * 15 + "…": "rejected",
        "世界": "rejected",
    }
    assert found["·of"]["parent"] == "·heart"
    assert len({found[text]["y"] for text in ("In", "·the", "·heart", "·of")}) == 1
    for node in nodes:
        if node["parent"]:
            assert node["x"] > found[node["parent"]]["x"] + found[node["parent"]]["width"]
            assert node["y"] >= found[node["parent"]]["y"]
        assert node["x"] + node["width"] <= width
        assert node["y"] + node_height <= height
        for other in nodes:
            apart = (
                node["x"] + node["width"] < other["x"]
                or other["x"] + other["width"] < node["x"]
                or abs(node["y"] - other["y"]) > node_height
            )
            assert apart or node is other


def test_steps_and_speed_are_known_without_trees(page: Page) -> None:
    """A step ends with the model's own token, so sources alone tell how long steps are."""
    script = """
        const done = arguments[arguments.length - 1];
        import("./page/record.js").then(({ Record }) => {
          const record = new Record("dflash", 1);
          const rates = [record.rate(0)];
          arguments[0].forEach((sources, i) => {
            const tokens = sources.map(() => "x");
            const told = { sources, tokens, token_ids: tokens.map(() => 7) };
            const delta = { content: tokens.join("") };
            record.take({ delta, paceline: told, finish_reason: i === 3 ? "length" : null }, 1000 * i);
            rates.push(record.rate(1000 * i));
          });
          done([rates, record.histogram, record.acceptLength, record.steps, record.text,
            record.tokens.map((token) => token.step)]);
        });
    """
    # The prompt's pass; a step; two that came together; one that was cut.
    told = [
        ["target"],
        ["dflash", "dflash", "target"],
        ["dflash", "target", "target"],
        ["dflash", "dflash"],
    ]
    found = page.driver.execute_async_script(script, told)
    rates, histogram, accept_length, steps, text, places = found
    assert histogram == [0, 1, 2, 1]
    assert accept_length == 8 / 4
    assert [(step["start"], step["count"], step["tree"]) for step in steps] == [
        (1, 3, None),
        (4, 2, None),
        (6, 1, None),
        (7, 2, None),
    ]
    assert text == "x" * 9
    assert places == [-1, 0, 0, 0, 1, 1, 2, 3, 3]
    # Nothing, one arrival, then what came after the first of the last two seconds.
    assert rates == [None, None, 3.0, 3.0, 2.5]
