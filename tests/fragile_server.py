"""`python -m tests.fragile_server serve ...`: the real command line, whose engine does what a file says before each step.

The file is named by FRAGILE_SERVER: a number, and it does nothing once it has made so many steps; `die`, and the step
fails; no file, and it goes on. So a test finds the engine in the middle of its work, however busy the machine is.
For the same reason the server has more patience, while it ends, for answers to come to theirs.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from paceline.api.server import life
from paceline.cli import main
from paceline.core.meanwhile import Meanwhile
from paceline.engine.engine import Engine

step = Engine.step
made = [0]  # steps


def told() -> str | None:
    try:
        return Path(os.environ["FRAGILE_SERVER"]).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def fragile(self: Engine, meanwhile: Meanwhile) -> object:
    word = told()
    if word == "die":
        msg = "the machine is on fire"
        raise RuntimeError(msg)
    # An empty file is one that is being written. Requests are taken between steps, while it waits too.
    if word is not None and (not word or int(word) <= made[0]):
        time.sleep(0.002)
        return []
    made[0] += 1
    return step(self, meanwhile)


if __name__ == "__main__":
    life.LAST_WORDS_S = 5.0  # type: ignore[misc]
    life._GRACE_S = 60.0
    Engine.step = fragile  # type: ignore[method-assign, assignment]
    sys.exit(main())
