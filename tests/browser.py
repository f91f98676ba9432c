"""A headless Chromium and the page in it, for tests; no tests here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 90.0
IDLE = "return document.body.dataset.ready === 'true' && !document.getElementById('send').disabled"
LINE = "a b a b a b a b"  # what the suffix drafter can go on with


@contextmanager
def chromium() -> Iterator[Any]:
    """A selenium driver; its logs tell what the page said and asked for. Skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("chromium or chromedriver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # root has none
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield found
    finally:
        found.quit()


def said(driver: Any) -> list[str]:
    """What stands in the browser's console since it was last asked: errors, violations of policies."""
    return [entry["message"] for entry in driver.get_log("browser")]


def asked(driver: Any) -> list[tuple[str, str]]:
    """What was asked for over the network since this was last called: ids and addresses."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return [(params["requestId"], params["request"]["url"]) for params in sent]


def emulate(driver: Any, **features: str) -> None:
    """Let media queries see these features; underscores stand for hyphens."""
    named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})


def resize(driver: Any, width: int, height: int) -> None:
    """Make the page this large in CSS pixels; a window cannot be as narrow as a telephone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


class Page:
    """The page as somebody uses it."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        self.asked: list[str] = []  # addresses
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

    def events(self) -> list[dict[str, Any]]:
        """All that the server has streamed since this was last called, as it was on the wire."""
        events = []
        for request_id, url in asked(self.driver):
            self.asked.append(url)
            if not url.endswith("/completions"):
                continue
            found = self.driver.execute_cdp_cmd(
                "Network.getResponseBody", {"requestId": request_id}
            )
            lines = found["body"].split("\n\n")
            events += [
                json.loads(line.removeprefix("data: "))
                for line in lines
                if line.startswith("data: {")
            ]
        return events

    def heard(self) -> list[dict[str, Any]]:
        """The choices of all these events."""
        return [choice for event in self.events() for choice in event["choices"]]

    def send(self, text: str = LINE, *, tokens: str = "40") -> None:
        self.put("#max-tokens", tokens)
        self.put("#prompt", text)
        self.element("#send").click()

    def ask(self, text: str = LINE, *, tokens: str = "40") -> None:
        self.send(text, tokens=tokens)
        self.wait(IDLE)
