"""The page without a mouse, on a narrow screen, light and dark."""

from __future__ import annotations

from typing import Any

from tests.browser import IDLE, LINE, Page, emulate, resize


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
    script = """
        const done = arguments[arguments.length - 1];
        const nodes = [...Array(30).keys()];
        const tree = { tokens: nodes.map(() => "a long token"), parents: nodes.map((i) => i - 1),
          sources: nodes.map(() => "ddtree"), scores: nodes.map(() => 0), path: [0], emitted: ["b"] };
        import("./page/treeview.js").then(({ drawTree }) => {
          drawTree(document.getElementById("tree"), tree);
          done(document.querySelector("#tree svg").clientWidth);
        });
    """
    assert page.driver.execute_async_script(script) > 3000, "a tree is wider, and scrolls by itself"
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
