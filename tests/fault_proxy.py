"""A proxy between a client of S3 and the service that fails in chosen ways. One request per connection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

_READ = 1 << 16


class Fault(Enum):
    """What happens to a request."""

    RESET = "connection reset before the request is answered, with nothing sent on"
    RESET_AFTER = "connection reset after the service has done what was asked"
    BUSY = "503 Slow Down"
    FORBIDDEN = "403 Access Denied"
    FULL = "507 Insufficient Storage"
    SILENT = "no answer until the client gives up"
    CUT_UPLOAD = "half of the body reaches the service"
    CUT_DOWNLOAD = "half of the answer's body reaches the client"
    MANGLED = "400 Bad Digest: the service found other bytes than the checksum says"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the proxy knows of a request when it decides."""

    method: str
    target: str  # path and query
    number: int  # of all requests, from 1


Plan = Callable[[Request], Fault | None]


@dataclass(kw_only=True)
class FaultProxy:
    """The endpoint, what it saw, and what it does; `plan` may be changed at any time."""

    endpoint: str
    plan: Plan = lambda request: None
    seen: list[Request] = field(default_factory=list)

    def count(self, method: str, part: str = "") -> int:
        """Requests of a method whose target has `part` in it."""
        return sum(request.method == method and part in request.target for request in self.seen)


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """A proxy on a free port; its threads end with the block."""
    address = (urlsplit(upstream).hostname, urlsplit(upstream).port)
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = FaultProxy(endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}")
    ended, threads = threading.Event(), list[threading.Thread]()

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=_serve, args=(client, address, proxy, ended), daemon=True)
            threads.append(thread)
            thread.start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield proxy
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in (acceptor, *threads):
            thread.join(timeout=10)


def _serve(client: socket.socket, address: tuple[str | None, int | None], proxy: FaultProxy, ended: threading.Event):
    with client, suppress(OSError):  # a client that went away is what some faults are about
        head, body = _read_head(client)
        if not head:
            return
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        request = Request(method=method, target=target, number=len(proxy.seen) + 1)
        proxy.seen.append(request)
        fault = proxy.plan(request)
        if fault is Fault.RESET:
            return _reset(client)
        if fault is Fault.SILENT:
            ended.wait(30)
            return None
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        if any(name.lower() == "expect" for name in headers):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = int(next((value for name, value in headers.items() if name.lower() == "content-length"), 0))
        while len(body) < length and (more := client.recv(_READ)):
            body += more
        answers = {
            Fault.BUSY: ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
            Fault.FORBIDDEN: ("403 Forbidden", "AccessDenied", "Access Denied"),
            Fault.FULL: ("507 Insufficient Storage", "InsufficientStorage", "No space left"),
            Fault.MANGLED: ("400 Bad Request", "BadDigest", "The SHA256 you specified did not match"),
        }
        if fault in answers:
            return client.sendall(_refusal(*answers[fault], empty=method == "HEAD"))
        kept = [f"{name}: {value}" for name, value in headers.items() if name.lower() not in ("expect", "connection")]
        sent = "\r\n".join([lines[0], *kept, "Connection: close", "", ""]).encode("latin-1")
        with socket.create_connection(address) as service:  # pyright: ignore[reportArgumentType]
            if fault is Fault.CUT_UPLOAD:
                service.sendall(sent + body[: length // 2])
                service.shutdown(socket.SHUT_WR)
                service.recv(_READ)  # it has noticed
                return _reset(client)
            service.sendall(sent + body)
            answer = b"".join(iter(lambda: service.recv(_READ), b""))
        if fault is Fault.RESET_AFTER:
            return _reset(client)
        if fault is Fault.CUT_DOWNLOAD:
            start = answer.index(b"\r\n\r\n") + 4
            client.sendall(answer[: start + (len(answer) - start) // 2])
            return _reset(client)
        client.sendall(answer)
    return None


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """The request's head and what of its body came with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(_READ)
        if not more:
            return b"", b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body


def _refusal(status: str, code: str, message: str, *, empty: bool) -> bytes:
    body = b"" if empty else f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return f"{head}\r\n".encode() + body


def _reset(client: socket.socket) -> None:
    """End with RST rather than FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
