"""The page at /, in a browser, against the real server process. Whom it is for: test_page_access.py."""

from __future__ import annotations

import re
from typing import Any

import httpx2

from paceline.api.server.settings import ServerSettings
from tests.browser import IDLE, LINE, Page, said
from tests.local_server import local_server
from tests.relay import Relay
from tests.server_process import ServerProcess


def test_a_chat_answers_and_tokens_say_where_they_came_from(page: Page) -> None:
    """What is shown is the server's answer, token by token, tinted, underlined and in words."""
    page.ask()
    choices = page.heard()
    sources = [s for choice in choices for s in choice.get("paceline", {}).get("sources", ())]
    sent = "".join(choice["delta"].get("content", "") for choice in choices)
    assert page.text(".answer .text") == sent != ""
    script = (
        "return [...document.querySelectorAll('.answer .token')].map(e =>"
        " [e.dataset.source, e.title, getComputedStyle(e).textDecorationStyle,"
        " getComputedStyle(e).textDecorationLine])"
    )
    spans = page.run(script)
    assert [span[0] for span in spans] == sources
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
    told = [tree for c in page.heard() for tree in c.get("paceline", {}).get("trees", ())]
    assert len(steps) == len(told)
    emitted = page.run("return document.querySelector('.answer .token').textContent")
    for i, (step, tree) in enumerate(zip(steps, told, strict=True)):
        drafted = len(tree["tokens"]) - 1
        assert step["accepted"] == len(tree["path"]) - 1
        assert step["rejected"] == drafted - step["accepted"]
        assert step["own"] == len(tree["emitted"]) - step["accepted"]
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
    bars = re.findall(r"(\d+) tokens?(\d+) steps?", page.text("#histogram").replace("\n", ""))
    sizes = [len(step["marked"]) for step in steps]
    assert [(int(n), int(count)) for n, count in bars] == [
        (n, sizes.count(n)) for n in range(1, max(sizes) + 1)
    ]


def test_the_rate_of_a_whole_answer_is_what_the_server_measured(page: Page) -> None:
    """Not what the browser has seen, which is the connection's as well."""
    page.ask()
    page.wait("return document.getElementById('rate-name').textContent === 'Tokens per second'")
    [told] = [event["timings"] for event in page.events() if "timings" in event]
    rate = told["predicted_per_second"]
    shown = page.text("#rate")
    assert ("." in shown) == (rate < 10)
    assert abs(float(shown) - rate) <= (0.051 if rate < 10 else 0.51)


def test_a_live_answer_shows_its_newest_tree(browser: Any, server: ServerProcess) -> None:
    """While more is to come: the tree, the step's number, and a rate that says it is of now."""
    with Relay(server.url) as relay:
        page = Page(browser, relay.url)
        relay.stall_after(b'"trees":[{')
        page.send(tokens="200")
        page.wait("return document.querySelectorAll('#tree .node.root').length === 1")
        assert page.element("#transcript").get_attribute("aria-busy") == "true"
        last = page.run("return document.getElementById('step').max")
        assert page.text("#step-number") == f"{last} of {last}"
        assert re.match(r"\d+ drafted: |Nothing was drafted", page.text("#tree-words"))
        own = page.run("return document.querySelectorAll('#tree .node:is(.accepted, .own)').length")
        marked = page.run("return document.querySelectorAll('.answer .token.current').length")
        assert own > 0
        assert marked <= own, "a token has no place in the text until its characters are whole"
        assert page.text("#rate-name") == "Tokens per second now"
        assert re.fullmatch(r"–|\d+(\.\d)?", page.text("#rate"))
        page.element("#stop").click()
        page.wait(IDLE)
        assert page.text("#rate-name") == "Tokens per second now", "no figure of the server's came"
    said(browser)


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


def test_a_key_that_is_asked_for_is_said_to_be_missing(browser: Any) -> None:
    """And where it goes; with it the message is answered."""
    with local_server(settings=ServerSettings(api_key=("open",))) as server:
        page = Page(browser, server.url)
        page.ask()
        assert page.text("#error").startswith("The server wants an API key (401): no API key was")
        page.put("#key", "open")
        page.element("#send").click()
        page.wait(IDLE)
        assert page.text(".answer .text")
        assert not page.element("#error").is_displayed()
        # This engine tells no trees, as a GPU's may not; the figures are there all the same.
        assert page.text("#tree-words").startswith("The server does not know this step's tree")
        assert int(page.text("#num-steps")) > 1
        assert page.run("return document.activeElement.id") == "send"
    said(browser)


def test_a_server_that_takes_nothing_or_fails_is_said_to(browser: Any) -> None:
    """That it is worth trying again, and when; or that it is not."""
    with local_server() as server:
        page = Page(browser, server.url)
        server.on_events(server.service.stop_admitting)
        page.ask()
        assert page.text("#error").startswith("The server takes no request now (503): ")
        assert re.search(r"Try again in \d+ s\.$", page.text("#error"))

    def fail(step: int) -> None:
        if step == 3:
            msg = "the cable is loose"
            raise OSError(msg)

    with local_server(on_step=fail) as server:
        page = Page(browser, server.url)
        page.ask()
        assert page.text("#error").startswith("The answer ended early: ")
        assert page.text(".answer .text"), "what had come stays"
    said(browser)


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
