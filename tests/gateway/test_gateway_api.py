"""The lifecycle routes seen from HTTP: statuses, shapes and what is refused."""

from __future__ import annotations

from typing import Any

import aiohttp
from gateway_rig import Rig, gateway

from canter.types import Outcome

REWARD = "/api/rollouts/r1/attempts/1/reward"


async def send(rig: Rig, method: str, path: str, data: bytes = b"", *, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key or rig.service_key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, rig.url + path, data=data or None, headers=headers) as response,
    ):
        assert response.headers["x-request-id"].startswith("req_")
        return response.status, await response.json(content_type=None)


async def test_a_reward_must_be_a_finite_number() -> None:
    async with gateway() as rig:
        await rig.store.end_attempt("r1", 1, Outcome.EXITED)
        for data in (b'{"value": NaN}', b'{"value": Infinity}', b'{"value": -Infinity}', b'{"value": 1e999}'):
            status, reply = await send(rig, "POST", REWARD, data)
            assert (status, reply["error"]["type"]) == (422, "unprocessable"), data
        for data in (
            b"",
            b"{}",
            b"[]",
            b'{"value": "1"}',
            b'{"value": null}',
            b'{"value": true}',
            b'{"value": [1]}',
            b"{",
        ):
            status, reply = await send(rig, "POST", REWARD, data)
            assert (status, reply["error"]["type"]) == (400, "bad_request"), data
        assert (await send(rig, "POST", REWARD, b'{"value": 1}'))[0] == 200
        status, reply = await send(rig, "POST", REWARD, b'{"value": 0}')
        assert (status, reply["error"]["type"]) == (409, "refused")
        assert (await rig.store.rollout("r1")).reward == 1.0


BAD: list[tuple[str, str, bytes, int]] = [
    ("POST", "/api/rollouts", b"[]", 400),
    ("POST", "/api/rollouts", b'{"rollouts": 1}', 400),
    ("POST", "/api/rollouts", b'{"rollouts": [{"id": "a"}]}', 400),
    ("POST", "/api/rollouts", b'{"rollouts": [{"id": "", "group": "g", "task": {"id": "t", "prompt": "p"}}]}', 400),
    ("POST", "/api/rollouts", b'{"rollouts": [{"id": "a", "group": "g", "task": {"id": 1, "prompt": "p"}}]}', 400),
    ("GET", "/api/rollouts?state=flying", b"", 400),
    ("GET", "/api/rollouts?limit=many", b"", 400),
    ("GET", "/api/rollouts?limit=-1", b"", 400),
    ("GET", "/api/rollouts?group=%ff", b"", 400),
    ("GET", "/api/rollouts/nobody", b"", 404),
    ("POST", "/api/rollouts/nobody/cancel", b"{}", 404),
    ("POST", "/api/rollouts/r1/attempts", b'{"number": 0}', 400),
    ("POST", "/api/rollouts/r1/attempts", b'{"number": "1"}', 400),
    ("POST", "/api/rollouts/r1/attempts", b'{"number": 2}', 409),
    ("POST", "/api/rollouts/r1/attempts/x/end", b'{"outcome": "exited"}', 404),
    ("POST", "/api/rollouts/r1/attempts/1/end", b'{"outcome": "exploded"}', 400),
    ("POST", "/api/rollouts/r1/attempts/1/end", b'{"outcome": "exited", "exit_code": "0"}', 400),
    ("POST", "/api/rollouts/r1/attempts/2/end", b'{"outcome": "exited"}', 409),
    ("POST", "/api/rollouts/r1/attempts/1/invalid", b'{"reason": "bored"}', 400),
    ("PUT", "/api/rollouts/r1/attempts/1/process", b"[]", 400),
    ("GET", "/api/rollouts/r1/attempts/7/grading", b"", 404),
    ("GET", "/api/events?after=x", b"", 400),
    ("GET", "/api/events?timeout_s=nan", b"", 400),
    ("GET", "/api/events?timeout_s=-1", b"", 400),
    ("GET", "/api/calls?attempt=x", b"", 400),
    ("GET", "/api/calls/none/bodies", b"", 404),
    ("PUT", "/api/engines", b'{"url": "x"}', 400),
    ("PUT", "/api/engines", b'{"url": "x", "model": "m", "version": -1}', 400),
    ("DELETE", "/api/engines", b"", 400),
    ("POST", "/api/versions", b'{"version": 1.5, "step": 0}', 400),
    ("PUT", "/api/facts/x", b"{}", 400),
    ("PATCH", "/api/rollouts", b"", 405),
    ("DELETE", "/api/rollouts/r1", b"", 405),
    ("GET", "/api/nothing", b"", 404),
    ("GET", "/api/", b"", 404),
    ("GET", "/nothing", b"", 404),
]


async def test_bad_requests_are_named_and_change_nothing() -> None:
    async with gateway() as rig:
        for method, path, data, status in BAD:
            got, reply = await send(rig, method, path, data)
            assert got == status, f"{method} {path} {data!r}: {got} {reply}"
            assert set(reply["error"]) == {"type", "message"}
        assert [r.id for r in await rig.store.rollouts()] == ["r1"]


async def test_a_grading_before_any_call() -> None:
    async with gateway() as rig:
        status, reply = await send(rig, "GET", "/api/rollouts/r1/attempts/1/grading")
    assert status == 200
    assert (reply["calls"], reply["last_message"], reply["outcome"]) == (0, None, None)


async def test_the_last_message_is_the_main_agents() -> None:
    async with gateway() as rig:
        await rig.chat()
        title = {"model": "policy", "messages": [{"role": "system", "content": "You are a title generator."}]}
        title["messages"].append({"role": "user", "content": "x"})
        await rig.post("/v1/chat/completions", title)
        _, grading = await send(rig, "GET", "/api/rollouts/r1/attempts/1/grading")
        labels = [call.label for call in await rig.store.calls(["r1"])]
    assert labels == ["main", "title"]
    assert grading["last_message"] == "reply 0"


async def test_the_last_message_is_that_of_either_dialect() -> None:
    async with gateway() as rig:
        await rig.chat()
        _, one = await send(rig, "GET", "/api/rollouts/r1/attempts/1/grading")
        await rig.post("/v1/completions", {"model": "policy", "prompt": "x"})
        _, two = await send(rig, "GET", "/api/rollouts/r1/attempts/1/grading")
    assert [one["last_message"], two["last_message"]] == ["reply 0", "reply 1"]
    assert [one["calls"], two["calls"]] == [1, 2]
