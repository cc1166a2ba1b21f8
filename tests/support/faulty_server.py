"""A proxy for reading from a web server that stalls, answers 500, or cuts answers in the middle, as it is told."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter

STALL = 20.0
"""Seconds for which a stalled answer is held back: longer than any request is waited for in a test."""


class FaultyProxy:
    """Forwards requests without a body to a server; every `period`-th GET of a range meets the next fault of the list.

    Args:
        host: the server's host.
        port: its port.
    """

    def __init__(self, host: str, port: int):
        self.target, self.faults, self.period = (host, port), list[str](), 1
        self.done: Counter[str] = Counter()
        self.gets = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """One request per connection: the answer says that the connection is closed after it."""
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                part = client.recv(65536)
                if not part:
                    return
                head += part
            fault = self._next_fault(head)
            if fault == "stall":
                time.sleep(STALL)
                return
            if fault == "error":
                client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            lines, _, body = head.partition(b"\r\n\r\n")
            kept = [line for line in lines.split(b"\r\n") if not line.lower().startswith(b"connection:")]
            with socket.create_connection(self.target) as server:
                server.sendall(b"\r\n".join([*kept, b"Connection: close"]) + b"\r\n\r\n" + body)
                answer = bytearray()
                while part := server.recv(65536):
                    if fault != "cut":
                        client.sendall(part)
                    answer += part
            if fault == "cut":
                begin = answer.index(b"\r\n\r\n") + 4
                client.sendall(answer[: begin + (len(answer) - begin) // 2])

    def _next_fault(self, head: bytes) -> str:
        if not head.startswith(b"GET ") or b"range:" not in head.lower():
            return ""
        with self._lock:
            self.gets += 1
            if not self.faults or self.gets % self.period:
                return ""
            fault = self.faults.pop(0)
            self.done[fault] += 1
            return fault
