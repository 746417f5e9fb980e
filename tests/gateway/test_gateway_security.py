"""Keys: what each kind may do, what is refused, and that refusals are logged without the key."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import aiohttp
import pytest
from gateway_rig import config, gateway

from canter.config.tree import GatewayConfig
from canter.errors import ConfigError
from canter.gateway.redact import redact
from canter.gateway.serve import check_bind, serve
from canter.types import Outcome, Reason, RolloutState

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
SERVICE_ROUTES = [
    ("GET", "/api/rollouts", None),
    ("POST", "/api/rollouts", {"rollouts": []}),
    ("GET", "/api/rollouts/r1", None),
    ("GET", "/api/rollouts/r2", None),
    ("POST", "/api/rollouts/r1/cancel", {}),
    ("POST", "/api/rollouts/r2/cancel", {}),
    ("POST", "/api/rollouts/r1/attempts", {"number": 2}),
    ("PUT", "/api/rollouts/r1/attempts/1/process", {"pid": 1}),
    ("POST", "/api/rollouts/r1/attempts/1/end", {"outcome": "exited"}),
    ("POST", "/api/rollouts/r1/attempts/1/invalid", {"reason": "node_lost"}),
    ("POST", "/api/rollouts/r1/attempts/1/grader-key", {}),
    ("GET", "/api/attempts", None),
    ("GET", "/api/events?after=0", None),
    ("GET", "/api/stats", None),
    ("GET", "/api/calls?rollout=r1", None),
    ("GET", "/api/calls/x/bodies", None),
    ("PUT", "/api/engines", {"url": "http://e", "model": "m", "version": 0}),
    ("DELETE", "/api/engines?url=x", None),
    ("GET", "/api/engines", None),
    ("POST", "/api/versions", {"version": 0, "step": 0}),
    ("GET", "/api/versions", None),
    ("POST", "/api/pause", {}),
    ("POST", "/api/resume", {}),
    ("PUT", "/api/facts/x", {"value": 1}),
    ("GET", "/api/facts/x", None),
    ("POST", "/api/keys", {"kind": "admin"}),
]
GRADER_ROUTES = [
    ("POST", "/api/rollouts/r1/attempts/1/reward", {"value": 1.0}),
    ("GET", "/api/rollouts/r1/attempts/1/grading", None),
]
KEYLESS: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer ck-agent-wrong"},
    {"authorization": "Basic dXNlcjpwYXNz"},
    {"x-api-key": ""},
    {"x-api-key": "ck-agent-wrong"},
    {"authorization": "Bearer null"},
    {"authorization": "Bearer " + "x" * 5000},
    {"authorization": "Bearer \xff\xfe"},
]


async def test_an_agent_key_opens_nothing_under_api() -> None:
    async with gateway() as rig:
        await rig.start("r2")
        for method, path, body in SERVICE_ROUTES + GRADER_ROUTES:
            status, reply = await rig.post(path, body, method=method)
            assert (status, reply["error"]["type"]) == (403, "forbidden"), path
        rollouts = await rig.store.rollouts()
    assert {rollout.state for rollout in rollouts} == {RolloutState.RUNNING}


async def test_a_grader_key_opens_no_service_route() -> None:
    async with gateway() as rig:
        key = await rig.grader_key("r1")
        for method, path, body in SERVICE_ROUTES:
            status, _ = await rig.post(path, body, method=method, key=key)
            assert status == 403, path


async def test_a_grader_key_is_for_its_own_attempt_only() -> None:
    async with gateway() as rig:
        await rig.start("r2")
        key = await rig.grader_key("r2")
        for method, path, body in GRADER_ROUTES:
            status, reply = await rig.post(path, body, method=method, key=key)
            assert (status, reply["error"]["type"]) == (403, "forbidden")
        status, reply = await rig.post("/api/rollouts/r2/attempts/1/grading", None, method="GET", key=key)
        assert (status, reply["task"]["hidden"]) == (200, {"answer": "hi"})


@pytest.mark.parametrize("kind", ["grader", "service", "admin"])
async def test_only_an_agent_key_calls_the_model(kind: str) -> None:
    async with gateway() as rig:
        await rig.start("r2")
        keys = {"grader": await rig.grader_key("r2"), "service": rig.service_key, "admin": rig.admin_key}
        for path in ("/v1/chat/completions", "/v1/completions"):
            status, reply = await rig.post(path, CHAT, key=keys[kind])
            assert (status, reply["error"]["code"]) == (403, "forbidden")
        status, _ = await rig.post("/v1/models", None, method="GET", key=keys[kind])
        assert status == 403


async def test_no_key_and_wrong_keys_are_401_everywhere() -> None:
    routes = (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/api/rollouts"), ("GET", "/x"))
    async with gateway() as rig, aiohttp.ClientSession() as http:
        for headers in KEYLESS:
            for method, path in routes:
                async with http.request(method, rig.url + path, headers=headers, json=CHAT) as response:
                    assert response.status == 401
                    error = (await response.json())["error"]
                    assert error.get("code", error["type"]) in ("invalid_api_key", "unauthorized")


async def test_both_key_headers_are_taken_and_liveness_needs_none() -> None:
    async with gateway() as rig, aiohttp.ClientSession() as http:
        for headers in ({"Authorization": f"bearer {rig.agent_key}"}, {"X-Api-Key": rig.agent_key}):
            async with http.post(rig.url + "/v1/chat/completions", json=CHAT, headers=headers) as response:
                assert response.status == 200
        for method, path in (("HEAD", "/"), ("GET", "/healthz"), ("HEAD", "/api/hello")):
            async with http.request(method, rig.url + path) as response:
                assert response.status == 200


async def test_after_its_attempt_a_key_calls_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as rig:
        first = rig.attempts["r1"]
        await rig.store.end_attempt("r1", 1, Outcome.LOST, reason=Reason.NODE_LOST)
        for _ in range(2):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                status, reply = await rig.post("/v1/chat/completions", CHAT)
            assert (status, reply["error"]["code"]) == (409, "attempt_closed")
            _check_logged(caplog, "r1", "/v1/chat/completions", first.agent_key)
            if (await rig.store.rollout("r1")).attempt == 1:
                second = await rig.store.start_attempt("r1", 2)
        status, _ = await rig.post("/v1/chat/completions", CHAT, key=second.agent_key)
        assert status == 200
        assert [call.attempt for call in await rig.store.calls(["r1"])] == [2]


async def test_refusals_are_logged_with_rollout_and_route_and_never_with_the_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway() as rig:
        for method, path, body in (
            ("POST", "/api/rollouts/r1/attempts/1/reward", {"value": 1}),
            ("GET", "/api/rollouts/r2", None),
            ("POST", "/api/pause", {}),
        ):
            with caplog.at_level(logging.WARNING):
                caplog.clear()
                await rig.post(path, body, method=method)
            _check_logged(caplog, "r1", path, rig.agent_key)


def _check_logged(caplog: pytest.LogCaptureFixture, rollout_id: str, route: str, key: str) -> None:
    [record] = [r for r in caplog.records if r.name == "canter.gateway.app"]
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert rollout_id in message
    assert route in message
    assert key not in caplog.text
    assert key[-20:] not in caplog.text


async def test_hidden_parts_leave_only_where_they_are_asked_for() -> None:
    async with gateway() as rig:
        for path in ("/api/rollouts", "/api/rollouts/r1"):
            _, reply = await rig.post(path, None, method="GET", key=rig.service_key)
            assert "answer" not in str(reply)
            _, reply = await rig.post(f"{path}?hidden=1", None, method="GET", key=rig.service_key)
            assert "answer" in str(reply)


async def test_only_an_admin_issues_keys() -> None:
    async with gateway() as rig:
        status, _ = await rig.post("/api/keys", {"kind": "service"}, key=rig.service_key)
        assert status == 403
        status, reply = await rig.post("/api/keys", {"kind": "service"}, key=rig.admin_key)
        assert status == 200
        status, _ = await rig.post("/api/rollouts", None, method="GET", key=reply["key"])
        assert status == 200
        status, _ = await rig.post("/api/keys", {"kind": "agent"}, key=rig.admin_key)
        assert status == 400


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
def test_a_bind_beyond_loopback_needs_tls_or_insistence(host: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.insecure"):
        check_bind(GatewayConfig(host=host))
    check_bind(GatewayConfig(host=host, insecure=True))
    check_bind(GatewayConfig(host=host, tls_cert="c.pem", tls_key="k.pem"))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_a_bind_to_loopback_is_fine(host: str) -> None:
    check_bind(GatewayConfig(host=host))


def test_half_a_tls_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="go together"):
        check_bind(GatewayConfig(tls_cert="c.pem"))


async def test_a_port_in_use_is_a_config_error() -> None:
    async with gateway() as rig:
        taken = config(gateway={"port": int(rig.url.rsplit(":", 1)[1])})
        with pytest.raises(ConfigError, match=r"gateway\.port=0"):
            async with serve(rig.app, taken.gateway):
                pass


async def test_it_listens_on_a_unix_socket_as_well(tmp_path: Path) -> None:
    path = str(tmp_path / "gateway.sock")
    async with (
        gateway() as rig,
        serve(rig.app, config().gateway, uds=path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as http,
    ):
        headers = {"authorization": f"Bearer {rig.agent_key}"}
        async with http.post("http://gateway/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Incorrect API key provided: sk-proj-abcdefghijklmnop.", "sk-proj-abcdefghijklmnop"),
        ("Authorization: Bearer ck-agent-abcdefghijklmnopqrst", "ck-agent-abcdefghijklmnopqrst"),
        ("bad header 'bearer abc.def.ghi'", "abc.def.ghi"),
        ('{"api_key": "hunter2hunter2"}', "hunter2hunter2"),
        ("api-key=hunter2&x=1", "hunter2"),
        ("ck-grader-AAAAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAA"),
    ],
)
def test_what_looks_like_a_key_is_masked(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert "***" in redact(text)


def test_ordinary_text_stays() -> None:
    text = "messages[3].tool_calls[0].id is missing; the prompt has 300 tokens, the key is in the task-queue"
    assert redact(text) == text


def test_rig_keys_are_what_redact_knows() -> None:
    from canter.store.keys import new_secret
    from canter.types import KeyKind

    for kind in KeyKind:
        key = new_secret(kind)
        assert key not in redact(f"say {key} aloud")


async def test_tls_files_that_cannot_be_read_are_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    for name in ("bad.pem", "absent.pem"):
        file = str(tmp_path / name)
        async with gateway() as rig:
            with pytest.raises(ConfigError, match=re.escape(file)):
                async with asyncio.timeout(10), serve(rig.app, GatewayConfig(tls_cert=file, tls_key=file)):
                    pytest.fail("it serves")
