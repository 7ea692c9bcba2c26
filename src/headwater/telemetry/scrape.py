"""The Prometheus endpoint of a process: GET /metrics, in a thread of its own.

One setting, telemetry.prometheus_listen, serves all processes of a machine: each takes the port at
its place after the one named.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from headwater.errors import ConfigError
from headwater.telemetry.exposition import CONTENT_TYPE
from headwater.telemetry.metric import SERVICES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.telemetry.metric import Process

_PATH = "/metrics"


def scrape_address(listen: str, service: Process) -> tuple[str, int]:
    """Where `service` is scraped when telemetry.prometheus_listen is `listen`; port 0 stays 0."""
    host, _, port = listen.rpartition(":")
    first = int(port)
    host = host.removeprefix("[").removesuffix("]")
    return host, first and first + SERVICES.index(service)


@contextmanager
def scrape_endpoint(address: tuple[str, int], read: Callable[[], str]) -> Iterator[int]:
    """Serves what `read` gives, which may be called from several threads; yields the port.

    Raises ConfigError when the address cannot be bound.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != _PATH:
                self.send_error(HTTPStatus.NOT_FOUND, f"only {_PATH} is here")
                return
            body = read().encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """A line per scrape would fill the log."""

    server = _listen(address, Handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics-endpoint", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def _listen(address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    host, port = address
    try:
        return (_ServerV6 if ":" in host else _Server)(address, handler)
    except OSError as error:
        raise ConfigError(
            f"telemetry.prometheus_listen: cannot listen on {host}:{port} ({error.strerror}); "
            "the processes of a machine take this port and those after it: choose another"
        ) from error
