"""The page at /, in a browser, against the real server process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.browser import WAIT_S, addresses, chromium, emulate, resize, said
from tests.relay import Relay
from tests.server_process import ServerProcess

IDLE = "return document.body.dataset.ready === 'true' && !document.getElementById('send').disabled"
LINE = "a b a b a b a b"  # what the suffix drafter can go on with


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests; each loads the page anew."""
    with chromium() as found:
        yield found


class Page:
    """The page as somebody uses it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(f"{url}/")
        self.wait(IDLE)

    def wait(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, WAIT_S, 0.05).until(lambda d: d.execute_script(condition))

    def run(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def element(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """Of all that match, whether they are in sight or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent).join('\\n')"
        return self.run(script, selector)

    def put(self, selector: str, value: str) -> None:
        field = self.element(selector)
        field.clear()
        field.send_keys(value)

    def send(self, text: str = LINE, *, tokens: str = "40") -> None:
        self.put("#max-tokens", tokens)
        self.put("#prompt", text)
        self.element("#send").click()

    def ask(self, text: str = LINE, *, tokens: str = "40") -> None:
        self.send(text, tokens=tokens)
        self.wait(IDLE)


@pytest.fixture
def page(browser: Any, server: ServerProcess) -> Iterator[Page]:
    """The page, freshly loaded, wide and light; nothing in it may have failed at the end."""
    emulate(browser, prefers_color_scheme="light")
    resize(browser, 1280, 900)
    said(browser)
    addresses(browser)
    yield Page(browser, server.url)
    assert said(browser) == []
    assert all(url.startswith(server.url) for url in addresses(browser))


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": LINE}], "max_tokens": 40, **fields}
    return httpx2.post(f"{server.v1}/chat/completions", json=body, timeout=WAIT_S).json()


def test_a_chat_answers_and_tokens_say_where_they_came_from(
    page: Page, server: ServerProcess
) -> None:
    """What is shown is the server's answer, token by token, tinted, underlined and in words."""
    page.ask()
    told = chat(server, temperature=0, paceline={"sources": True})["choices"][0]
    assert page.text(".answer .text") == told["message"]["content"]
    script = (
        "return [...document.querySelectorAll('.answer .token')].map(e =>"
        " [e.dataset.source, e.title, getComputedStyle(e).textDecorationStyle,"
        " getComputedStyle(e).textDecorationLine])"
    )
    spans = page.run(script)
    assert [span[0] for span in spans] == told["paceline"]["sources"]
    kinds = {}
    for source, title, style, line in spans:
        kinds.setdefault(source, set()).add((style, line))
        assert ("accepted" in title) == (source != "target")
        assert "the model's own" in title or source != "target"
    assert len(kinds) > 1, "something was drafted"
    assert kinds["target"] == {("solid", "none")}
    assert all(("solid", "none") not in marks for name, marks in kinds.items() if name != "target")
    legend = page.text("#legend")
    assert f"the model's own {sum(s[0] == 'target' for s in spans)}" in legend


def test_the_tree_shows_nodes_and_the_accepted_path(page: Page) -> None:
    """Every step that was made can be looked at, and shows what the server said of it."""
    page.ask()
    script = """
        const done = arguments[arguments.length - 1];
        const all = (selector) => [...document.querySelectorAll(selector)];
        const count = (kind) => all(`#tree .node.${kind}`).length;
        const scrubber = document.getElementById("step");
        const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
        (async () => {
          const found = [];
          for (let step = 1; step <= Number(scrubber.max); step += 1) {
            scrubber.value = step;
            scrubber.dispatchEvent(new Event("input"));
            await frame();
            found.push({
              number: document.getElementById("step-number").value,
              root: count("root"), accepted: count("accepted"), own: count("own"),
              rejected: count("rejected"), edges: all("#tree .edge").length,
              words: document.getElementById("tree-words").textContent,
              texts: all("#tree .node:is(.accepted, .own) text").map((e) => e.textContent),
              marked: all(".answer .token.current").map((e) => e.textContent),
            });
          }
          done(found);
        })();
    """
    steps = page.driver.execute_async_script(script)
    emitted = page.run("return document.querySelector('.answer .token').textContent")
    for i, step in enumerate(steps):
        drafted = step["accepted"] + step["rejected"]
        assert step["number"] == f"{i + 1} of {len(steps)}"
        assert step["root"] == 1
        assert step["edges"] == drafted + step["own"]
        begins = f"{drafted} drafted: " if drafted else "Nothing was drafted"
        assert step["words"].startswith(begins)
        assert not drafted or f"rejected {step['rejected']}" in step["words"]
        assert len(step["marked"]) == step["accepted"] + step["own"]
        emitted += "".join(step["marked"])
    assert emitted == page.text(".answer .text"), "the steps spell the answer"
    assert any(step["accepted"] for step in steps)
    assert any(step["rejected"] for step in steps)
    bars = re.findall(r"(\d+) tokens?(\d+) steps?", page.text("#histogram").replace("\n", ""))
    sizes = [len(step["marked"]) for step in steps]
    assert [(int(n), int(count)) for n, count in bars] == [
        (n, sizes.count(n)) for n in range(1, max(sizes) + 1)
    ]


def test_two_drafters_side_by_side(page: Page) -> None:
    """The same prompt, seed and options; both answers, and whether they are equal."""
    page.element("#compare").click()
    page.put("#temperature", "0.8")
    page.ask()
    script = (
        "return [...document.querySelectorAll('.answer')].map(a => [a.querySelector('h3').textContent,"
        " a.querySelector('.text').textContent, a.getBoundingClientRect().top,"
        " a.querySelectorAll('.token:not([data-source=target])').length])"
    )
    first, second = page.run(script)
    assert (first[0], second[0]) == ("with suffix", "without a drafter")
    assert first[1] == second[1] != ""
    assert first[2] == second[2], "they stand side by side"
    assert second[3] == 0
    assert page.text(".verdict").startswith("The texts are equal; suffix made it ")
    seeds = re.findall(r"seed (\d+)", page.text(".note"))
    assert len(seeds) == 2
    assert seeds[0] == seeds[1]
    assert [o.text for o in page.element("#shown").find_elements("css selector", "option")] == [
        "1: suffix",
        "2: none",
    ]


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


def test_errors_are_sentences(page: Page) -> None:
    """The server's own words, and the message is still there to be sent again."""
    page.ask(tokens="99999")
    error = page.element("#error")
    assert error.get_attribute("role") == "alert"
    assert error.is_displayed()
    assert error.text.startswith(
        "The server refused this (400): the model's maximum context length"
    )
    assert error.text.endswith(".")
    assert page.element("#prompt").get_attribute("value") == LINE
    assert page.run("return document.querySelectorAll('.turn').length") == 0
    page.ask()
    assert not error.is_displayed(), "an error goes once something has worked"
    assert page.text(".answer .text")
    # A refusal is the one thing that a browser writes down by itself.
    assert all("status of 400" in line for line in said(page.driver))


def test_a_server_that_is_gone_is_said_to_be(browser: Any, server: ServerProcess) -> None:
    """In the middle of an answer and before one: a sentence each, and the page lives on."""
    with Relay(server.url) as relay:
        page = Page(browser, relay.url)
        relay.stall_after(b'"trees":[{')
        page.send(tokens="200")
        page.wait("return document.querySelectorAll('.answer .token').length > 0")
        relay.close()
        page.wait(IDLE)
        assert page.text("#error").startswith(
            "The answer was cut off: the connection to the server"
        )
        assert "is not whole" in page.text(".note")
        page.ask()
        assert page.text("#error").startswith(f"The server at {relay.url.split('/')[-1]} does not")
    said(browser)


def test_stop_ends_an_answer_and_clear_the_conversation(
    browser: Any, server: ServerProcess
) -> None:
    """What has come stays, nothing is called an error; Clear leaves nothing behind."""
    with Relay(server.url) as relay:
        page = Page(browser, relay.url)
        relay.stall_after(b'"trees":[{')
        page.send(tokens="200")
        page.wait("return document.querySelectorAll('.answer .token').length > 0")
        assert page.element("#transcript").get_attribute("aria-busy") == "true"
        page.element("#stop").click()
        page.wait(IDLE)
        assert page.text("#status") == "Stopped."
        assert not page.element("#error").is_displayed()
        assert page.text(".answer .text")
        assert page.element("#transcript").get_attribute("aria-busy") == "false"
        page.element("#clear").click()
        page.wait("return document.getElementById('num-steps').textContent === '–'")
        assert page.run("return document.querySelectorAll('.turn, #tree svg').length") == 0
    said(browser)


def test_everything_works_by_keyboard(page: Page) -> None:
    """Without a mouse: the order of focus is that of the page, focus is seen, every field has a name."""
    from selenium.webdriver.common.keys import Keys

    def focused() -> Any:
        return page.driver.switch_to.active_element

    assert focused().get_attribute("id") == "prompt"
    focused().send_keys(LINE, Keys.SHIFT, Keys.ENTER, Keys.NULL, "c d", Keys.ENTER)
    page.wait("return document.querySelectorAll('.answer .token').length > 0")
    page.wait(IDLE)
    assert page.text(".asked .text") == f"{LINE}\nc d"
    seen = []
    for _ in range(18):
        focused().send_keys(Keys.TAB)
        seen.append(focused().get_attribute("id"))
        outline = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"{seen[-1]} does not show that it has the focus"
        if seen[-1] == "step":
            before = page.text("#step-number")
            focused().send_keys(Keys.HOME)
            page.wait("return document.getElementById('step-number').value.startsWith('1 of')")
            focused().send_keys(Keys.ARROW_RIGHT)
            page.wait("return document.getElementById('step-number').value.startsWith('2 of')")
            assert page.text("#step-number") != before
        if seen[-1] == "tree":
            break
    form = [
        "send",
        "clear",
        "temperature",
        "max-tokens",
        "seed",
        "drafter",
        "compare",
        "other",
        "key",
    ]
    panel = ["shown", "earlier", "step", "later", "follow", "tree"]
    assert seen == form + panel
    unnamed = page.run(
        "return [...document.querySelectorAll('input, select, textarea, button')].filter(e =>"
        " !e.labels?.length && !e.getAttribute('aria-label') && !e.textContent.trim()).map(e => e.id)"
    )
    assert unnamed == []
    log = page.element("#transcript")
    assert (log.get_attribute("role"), log.get_attribute("aria-live")) == ("log", "polite")


def test_a_narrow_screen_scrolls_one_way_only(page: Page) -> None:
    """At 320 pixels everything is there, and nothing has to be scrolled sideways for."""
    resize(page.driver, 320, 640)
    page.element("#compare").click()
    page.ask("x" * 200)
    wide = page.run(
        "const most = document.documentElement.clientWidth;"
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('#tree') &&"
        " !e.closest('.skip') && !e.closest('.unseen') &&"
        " e.getBoundingClientRect().right > most + 1).map(e => e.id || e.className)"
    )
    assert wide == []
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    tops = page.run(
        "return [...document.querySelectorAll('.answer')].map(a => a.getBoundingClientRect().top)"
    )
    assert tops[0] < tops[1], "answers stand one below the other"


def test_light_and_dark_are_both_legible(page: Page) -> None:
    """Text on every tint has the contrast that WCAG's level AA asks for, and motion can be reduced."""
    script = """
        const luminance = (color) => {
          const canvas = new OffscreenCanvas(1, 1).getContext("2d");
          canvas.fillStyle = color;
          canvas.fillRect(0, 0, 1, 1);
          return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
            .map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        };
        const style = getComputedStyle(document.documentElement);
        const value = (name) => luminance(style.getPropertyValue(name));
        const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const backs = ["back", "panel", "copy", "past", "block", "eagle", "grammar", "other", "error-back"];
        const found = backs.map((name) => [name, contrast(value("--text"), value(`--${name}`))]);
        for (const name of ["back", "panel"]) found.push([`soft on ${name}`, contrast(value("--soft"), value(`--${name}`))]);
        found.push(["button", contrast(value("--strong"), value("--on-strong"))]);
        return [found, value("--back")];
    """
    light, light_back = page.run(script)
    emulate(page.driver, prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    dark, dark_back = page.run(script)
    assert light_back > 0.8
    assert dark_back < 0.1
    weak = [(name, value) for name, value in light + dark if value < 4.5]
    assert weak == []
    moving = "return [...document.querySelectorAll('*')].filter(e => getComputedStyle(e).transitionDuration !== '0s').length"
    assert page.run(moving) == 0


def test_nothing_that_is_written_becomes_markup(page: Page, server: ServerProcess) -> None:
    """Text is text, whoever wrote it; and if code forgot that, the browser would refuse."""
    line = "<img src=x onerror=alert(1)><b>bold</b>"
    page.ask(line, tokens="5")
    assert page.text(".asked .text") == line
    assert (
        page.run("return document.querySelectorAll('#transcript img, #transcript b').length") == 0
    )
    refused = page.run(
        "try { document.body.innerHTML = '<p>x</p>'; return false } catch (e) { return e.name }"
    )
    assert refused == "TypeError"
    headers = httpx2.get(server.url).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "'unsafe" not in headers["content-security-policy"]
    assert any("TrustedHTML" in line for line in said(page.driver)), "policies are reported here"
