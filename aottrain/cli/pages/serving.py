"""One page over HTTP, to this machine alone: what a browser shows while runs go on."""

from __future__ import annotations

import dataclasses
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aottrain.report.runs.drawing.pages import render
from aottrain.report.runs.folders import Collection
from aottrain.toolchain.threads import Thread

HOST = "127.0.0.1"
_AGAIN_S = 5
_WAITING = "<!doctype html><html lang=en><title>aottrain</title><main><h1>aottrain</h1><p>nothing has been written yet"


class PageServer:
    """Listens on a free port of the loopback address from `with` to its end, and answers `/` with the page of what was
    shown last; anything else is not found. A request that names another host is refused: a foreign page, whose name a
    resolver may be made to point here, reads nothing."""

    def __init__(self) -> None:
        self._found: Collection | None = None
        self._page: bytes | None = None
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((HOST, 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        """The URL."""
        return f"http://{self.host}/"

    @property
    def host(self) -> str:
        """As a browser names it in a request."""
        return f"{HOST}:{self._server.server_address[1]}"

    def show(self, found: Collection) -> None:
        """From now on the page is of these runs; it is drawn when it is asked for."""
        with self._lock:
            self._found, self._page = dataclasses.replace(found, has_links=False), None

    def page(self) -> bytes:
        """The document."""
        with self._lock:
            if self._page is None:
                drawn = render(self._found, again_s=_AGAIN_S) if self._is_there() else _WAITING
                self._page = drawn.encode("utf-8", errors="replace")
            return self._page

    def headers(self) -> dict[str, str]:
        """Beside the document's length. Only a page without anything on it is asked for anew by the browser itself,
        which asks nobody: the others do so by their script, until somebody reads them or nothing answers."""
        with self._lock:
            again = {} if self._is_there() else {"Refresh": str(_AGAIN_S)}
        return {"Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store", **again}

    def _is_there(self) -> bool:
        return self._found is not None and bool(self._found.runs)

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(server: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "aottrain", ""

        def do_GET(self) -> None:
            if self.headers.get("Host") != server.host:
                self.send_error(403)
            elif self.path != "/":
                self.send_error(404)
            else:
                headers, page = server.headers(), server.page()
                self.send_response(200)
                for name, value in (headers | {"Content-Length": str(len(page))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the terminal shows the table."""

    return Handler
