"""Makes the pictures of the server's page in docs/img: the bundled model, its trained drafter, Chromium.

    python tools/page_screenshots.py [--out docs/img]

Needs chromium and chromedriver. What is shown is what the page does: nothing is drawn by hand.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parent.parent
START_S = 240.0
ANSWER_S = 120.0
MOST_BYTES = 200_000
PROMPT = "Write a Python function that adds two numbers, and one that multiplies them."
IDLE = "return document.body.dataset.ready === 'true' && !document.getElementById('send').disabled"
# A step that shows what there is to see: a long accepted path and rejected branches.
BEST_STEP = """
    const done = arguments[arguments.length - 1];
    const all = (selector) => document.querySelectorAll(selector).length;
    const scrubber = document.getElementById("step");
    const show = async (step) => {
      scrubber.value = step;
      scrubber.dispatchEvent(new Event("input"));
      await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    };
    (async () => {
      let [best, most] = [1, -1];
      for (let step = 1; step <= Number(scrubber.max); step += 1) {
        await show(step);
        const accepted = all("#tree .node.accepted");
        const fits = document.querySelector("#tree svg").clientWidth < document.getElementById("tree").clientWidth;
        const worth = fits ? 2 * Math.min(accepted, 3) + Math.min(all("#tree .node.rejected"), 8) : 0;
        if (worth > most) [best, most] = [step, worth];
      }
      await show(best);
      done(best);
    })();
"""


@contextmanager
def server() -> Iterator[str]:
    """A server of the bundled model; its address."""
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder) / "port"
        command = [sys.executable, "-m", "paceline", "serve"]
        with subprocess.Popen([*command, "--port", "0", "--port-file", str(port)]) as process:
            try:
                deadline = time.monotonic() + START_S
                while not (port.exists() and port.read_text().strip()):
                    if process.poll() is not None or time.monotonic() > deadline:
                        msg = "the server did not start; its log is above"
                        raise SystemExit(msg)
                    time.sleep(0.1)
                yield f"http://127.0.0.1:{port.read_text().strip()}"
            finally:
                process.terminate()


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    driver = shutil.which("chromedriver")
    if driver is None:
        msg = "chromedriver was not found; install chromium and chromium-driver"
        raise SystemExit(msg)
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    found = webdriver.Chrome(options=options, service=Service(driver))
    found.set_script_timeout(ANSWER_S)
    try:
        yield found
    finally:
        found.quit()


class Photographer:
    """Uses the page and takes pictures of it."""

    def __init__(self, driver: Any, url: str, out: Path) -> None:
        self._driver = driver
        self._url = url
        self._out = out

    def load(self, width: int, height: int, *, dark: bool = False) -> None:
        """Load the page anew at a size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._driver.get(f"{self._url}/")
        self._wait()

    def ask(self, *, tokens: int, compare: bool = False) -> None:
        """Send the message and wait for the answer, or for what is wrong."""
        for name, value in (("max-tokens", str(tokens)), ("seed", "1"), ("prompt", PROMPT)):
            field = self._driver.find_element("id", name)
            field.clear()
            field.send_keys(value)
        if compare:
            self._driver.find_element("id", "compare").click()
        self._driver.find_element("id", "send").click()
        self._wait()

    def look_at_best_step(self) -> None:
        """Let the scrubber stand at the step that shows most."""
        self._driver.execute_async_script(BEST_STEP)

    def take(self, name: str, selector: str = "html") -> None:
        """Take a picture of an element, the page as a whole by default."""
        script = (
            "window.scrollTo(0, 0); const r = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return {x: r.x, y: r.y, width: r.width, height: r.height, scale: 1}"
        )
        clip = self._driver.execute_script(script, selector)
        asked = {"captureBeyondViewport": True, "clip": clip}
        data = base64.b64decode(
            self._driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"]
        )
        if len(data) >= MOST_BYTES:
            msg = f"{name} has {len(data)} bytes; less than {MOST_BYTES} are wanted"
            raise SystemExit(msg)
        (self._out / name).write_bytes(data)
        print(f"{self._out / name}: {len(data) / 1000:.0f} kB")

    def _wait(self) -> None:
        WebDriverWait(self._driver, ANSWER_S, 0.1).until(lambda d: d.execute_script(IDLE))


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "img", help="folder of the pictures"
    )
    with server() as url, browser() as driver:
        photographer = Photographer(driver, url, parser.parse_args().out)
        photographer.load(1200, 900)
        photographer.ask(tokens=90, compare=True)
        photographer.look_at_best_step()
        photographer.take("page-chat.png")
        photographer.take("page-tree.png", "#speculation")
        photographer.load(1200, 700, dark=True)
        photographer.ask(tokens=100_000)
        photographer.take("page-error.png")
        photographer.load(320, 700)
        photographer.ask(tokens=60)
        photographer.look_at_best_step()
        photographer.take("page-narrow.png")


if __name__ == "__main__":
    main()
