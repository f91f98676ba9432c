"""`python -m tests.fake_server PORT_FILE [die_at=N] [last_words=S] [setting=value ...]`: the server's process over a fake engine.

Steps take 5 ms and answers have no end, so that a signal finds work. At step N the engine dies. After a
second signal answers have S seconds to end.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from paceline.api.llm import LLM
from paceline.api.server import life, port_file
from paceline.api.server.app import create_app
from paceline.api.server.metrics import Metrics
from paceline.api.server.service import Service
from paceline.api.server.settings_values import settings_of
from tests.fake_engine import FakeEngine
from tests.served import TOKENIZER, ids


def main(written: str, *words: str) -> int:
    logging.basicConfig(level=logging.INFO)
    given: dict[str, Any] = {k: yaml.safe_load(v) for k, v in (w.split("=", 1) for w in words)}
    die_at = given.pop("die_at", 0)
    life.LAST_WORDS_S = given.pop("last_words", life.LAST_WORDS_S)  # type: ignore[misc]

    def step(number: int) -> None:
        time.sleep(0.005)
        if number == die_at:
            msg = "the machine is on fire"
            raise RuntimeError(msg)

    settings = settings_of({"port": 0, "served_model_name": "tiny", **given})
    listening = life.bound(settings)
    engine = FakeEngine(ids("abcdefghij"), max_len=10**6, on_step=step)
    with LLM.from_engine(engine, TOKENIZER) as llm:
        metrics = Metrics("tiny")
        service = Service(llm, settings, listener=metrics)
        app = create_app(service, metrics=metrics)

        def ready() -> None:
            if settings.uds is None:
                port_file.write(written, life.port_of(listening))
            else:
                Path(written).write_text("0\n")

        code = life.Life(app, service, listening, ready=ready).run()
    print("rows", len(engine._open), flush=True)  # noqa: T201 (a test reads it)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
