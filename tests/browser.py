"""A headless Chromium for tests of the page; no tests here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 30.0


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


def addresses(driver: Any) -> list[str]:
    """What was asked for over the network since this was last asked."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]


def emulate(driver: Any, **features: str) -> None:
    """Let media queries see these features; underscores stand for hyphens."""
    named = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": named})


def resize(driver: Any, width: int, height: int) -> None:
    """Make the page this large in CSS pixels; a window cannot be as narrow as a telephone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
