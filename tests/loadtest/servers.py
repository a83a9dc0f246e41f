"""Servers for the tests: the mock in a thread, and a server that sends scripted bytes."""

import asyncio
import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

from loadtest.mock_server import Mock, Timing
from tests.support.waiting import PATIENCE


@contextlib.contextmanager
def mock(timing: Timing) -> Iterator[str]:
    """The mock server's base URL."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(Mock(timing).serve("127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@contextlib.contextmanager
def scripted(
    play: Callable[[socket.socket], None] | bytes,
    connections: int = 1,
    tls: ssl.SSLContext | None = None,
    heard: list[bytes] | None = None,
) -> Iterator[str]:
    """Base URL of a server that reads each request, then sends `play` or lets it have the socket.

    All of it is read: closing a socket with bytes unread would reset the connection. The heads of
    the requests go into `heard`.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(PATIENCE)

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.settimeout(PATIENCE)
            if tls is not None:
                connection = stack.enter_context(tls.wrap_socket(connection, server_side=True))
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(65536)
            head, _, body = received.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            while length and len(body) < int(length[1]):
                body += connection.recv(65536)
            if heard is not None:
                heard.append(head)
            if isinstance(play, bytes):
                connection.sendall(play)
            else:
                play(connection)

    def accept() -> None:
        players = []
        for _ in range(connections):
            player = threading.Thread(target=answer, args=(listener.accept()[0],))
            player.start()
            players.append(player)
        for player in players:
            player.join()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join()
        listener.close()


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
