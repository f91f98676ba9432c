"""/docs in a browser: it needs nothing from elsewhere, and no wide window, and no mouse."""

from __future__ import annotations

from typing import Any

from tests.browser import asked, emulate, resize, said
from tests.local_server import local_server


def test_the_interface_can_be_read_offline(browser: Any) -> None:
    """All that is asked for comes from the server, and no policy is violated."""
    emulate(browser, prefers_color_scheme="dark")
    resize(browser, 320, 640)
    with local_server() as server:
        said(browser)
        asked(browser)
        browser.get(f"{server.url}/docs")
        addresses = [url for _, url in asked(browser)]
        assert f"{server.url}/docs/style.css" in addresses
        assert all(url.startswith(server.url) for url in addresses)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 320
        browser.execute_script(
            "document.querySelector('#post-v1-chat-completions summary').focus()"
        )
        assert browser.switch_to.active_element.text.startswith("Fields of the request")
        browser.switch_to.active_element.send_keys("\ue007")  # Enter
        cells = browser.find_elements(
            "css selector", "#post-v1-chat-completions details[open] code"
        )
        assert "temperature" in {cell.text for cell in cells}
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 320
        assert said(browser) == []
