"""/docs: the interface described, without a file from elsewhere; FastAPI's own page loads its from another server.

The description itself is /openapi.json, which FastAPI makes of the routes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from paceline.api.server.keys import is_guarded
from paceline.api.server.page import answer
from paceline.api.server.reference_page import BASE, page_of

# Whatever a client calls this server.
_ADDRESS = re.compile(r"https?://[\w.:\[\]-]+(?:/[\w./~-]*)?")
_HERE = "http://localhost:8000"


class Described(FastAPI):
    """An app whose description has no 422, which FastAPI adds: wrong values get 400 here."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # /docs and /openapi.json may be asked for at the same time, in two threads.
        self._making = threading.Lock()
        self._made: dict[str, Any] | None = None

    def openapi(self) -> dict[str, Any]:
        """What /openapi.json says; made once."""
        with self._making:
            if self._made is None:
                self._made = self._described()
        return self._made

    def _described(self) -> dict[str, Any]:
        found = super().openapi()
        for methods in found["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        return found


def router(description: Callable[[], dict[str, Any]], *, has_keys: bool) -> APIRouter:
    """The page's paths.

    Args:
        description: the OpenAPI object, once all routes are there.
        has_keys: the server asks for API keys.
    """
    routes = APIRouter(include_in_schema=False)
    here = resources.files(__package__)
    style = (here / "reference" / "style.css").read_bytes()
    icon = (here / "page" / "icon.svg").read_bytes()

    @cache
    def page() -> str:
        return page_of(
            description(), lambda path: has_keys and is_guarded({"path": path, "root_path": ""})
        )

    @routes.api_route("/docs", methods=["GET", "HEAD"])
    def docs(request: Request) -> Response:
        """The interface, for people."""
        asked = str(request.base_url).rstrip("/")
        address = asked if _ADDRESS.fullmatch(asked) else _HERE
        return answer(request, "index.html", page().replace(BASE, address).encode())

    @routes.api_route("/docs/style.css", methods=["GET", "HEAD"])
    async def look(request: Request) -> Response:
        """How it looks."""
        return answer(request, "style.css", style)

    @routes.api_route("/docs/icon.svg", methods=["GET", "HEAD"])
    async def sign(request: Request) -> Response:
        """The mark of its tab."""
        return answer(request, "icon.svg", icon)

    return routes
