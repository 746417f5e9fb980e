"""The small HTTP client in front of an OpenAI-compatible server, against scripted servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from yarl import URL

from canter.engine.origin import Origin
from canter.errors import ConfigError

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nok"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK
TWICE = OK + OK.replace(b"ok", b"no")
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Answers the nth request with `script(n)`, and hangs up after an answer that says so or is not whole."""

    def __init__(self, script: Callable[[int], bytes | None]) -> None:
        self._script = script
        self.origin: Origin
        self.requests: list[bytes] = []
        self.connections = 0
        self.asked = asyncio.Event()
        self.hung_up = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                answer = self._script(len(self.requests) - 1)
                if answer is None:  # says nothing until the client hangs up
                    await reader.read(1)
                    return
                writer.write(answer)
                if answer not in (OK, CHUNKED, INTERIM, TWICE):
                    return
        except asyncio.IncompleteReadError:
            return
        finally:
            self.hung_up.set()
            writer.close()


@asynccontextmanager
async def serving(script: Callable[[int], bytes | None], *, idle_s: float = 15) -> AsyncIterator[Server]:
    scripted = Server(script)
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    scripted.origin = Origin(URL(f"http://127.0.0.1:{port}/v1"), {"authorization": "Bearer k"}, idle_s=idle_s)
    try:
        yield scripted
    finally:
        scripted.origin.close()
        server.close()
        await asyncio.sleep(0)


async def one_after_another() -> None:
    async with serving(lambda n: OK) as server:
        replies = [await server.origin.post("/v1/x?y=1", b"body", timeout_s=5) for _ in range(3)]
        assert [(reply.status, reply.body) for reply in replies] == [(200, b"ok")] * 3
        assert server.connections == 1
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /v1/x?y=1 HTTP/1.1"
        assert b"authorization: Bearer k" in lines
        assert any(line.startswith(b"host: 127.0.0.1:") for line in lines)
        assert body == b"body"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_requests_follow_each_other_on_one_connection(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(one_after_another())


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with serving(lambda n: OK) as server:
        replies = await asyncio.gather(*(server.origin.post("/", b"%d" % n, timeout_s=5) for n in range(8)))
        assert [reply.body for reply in replies] == [b"ok"] * 8
        assert server.connections == 8
        await server.origin.post("/", b"", timeout_s=5)
        assert server.connections == 8


@pytest.mark.parametrize("answer", [OK, CHUNKED, UNTIL_CLOSE, INTERIM, CLOSING])
async def test_every_framing_of_a_reply_is_read(answer: bytes) -> None:
    async with serving(lambda n: answer if n == 0 else OK) as server:
        for _ in range(2):
            reply = await server.origin.post("/", b"{}", timeout_s=5)
            assert (reply.status, reply.body) == (200, b"ok")
            assert b"link" not in reply.headers
        assert server.connections == (2 if answer in (UNTIL_CLOSE, CLOSING) else 1)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", CHUNKED[:-5]])
async def test_a_reply_that_breaks_off_is_an_error(answer: bytes) -> None:
    async with serving(lambda n: answer) as server:
        with pytest.raises(ConnectionError, match=r"http://127.0.0.1:\d+ closed the connection before"):
            await server.origin.post("/", b"{}", timeout_s=5)


async def test_what_is_no_http_is_an_error() -> None:
    async with serving(lambda n: b"SSH-2.0-OpenSSH\r\n") as server:
        with pytest.raises(ConnectionError, match="does not answer in HTTP"):
            await server.origin.post("/", b"{}", timeout_s=5)


async def test_what_comes_after_a_reply_does_not_answer_the_next_request() -> None:
    async with serving(lambda n: TWICE if n == 0 else OK) as server:
        assert (await server.origin.post("/", b"{}", timeout_s=5)).body == b"ok"
        assert (await server.origin.post("/", b"{}", timeout_s=5)).body == b"ok"
        assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used() -> None:
    async with serving(lambda n: OK, idle_s=0) as server:
        await server.origin.post("/", b"{}", timeout_s=5)
        await server.origin.post("/", b"{}", timeout_s=5)
        assert server.connections == 2


async def test_a_late_reply_is_a_timeout_and_hangs_up() -> None:
    async with serving(lambda n: None) as server:
        with pytest.raises(TimeoutError):
            await server.origin.post("/", b"{}", timeout_s=0.05)
        await asyncio.wait_for(server.hung_up.wait(), 5)


async def test_cancelling_hangs_up() -> None:
    async with serving(lambda n: None) as server:
        task = asyncio.create_task(server.origin.post("/", b"{}", timeout_s=5))
        await asyncio.wait_for(server.asked.wait(), 5)
        task.cancel()
        await asyncio.wait_for(server.hung_up.wait(), 5)
        assert task.cancelled()


async def test_nobody_there_is_an_os_error() -> None:
    async with serving(lambda n: OK) as server:
        pass
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await server.origin.post("/", b"{}", timeout_s=5)


@pytest.mark.parametrize("url", ["ftp://host/v1", "http:///v1", "host:8000/v1", ""])
def test_a_url_without_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL of a server"):
        Origin(URL(url), {})
