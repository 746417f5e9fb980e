"""The grader's process: what it asks the gateway, what it posts, how it ends. The gateway here is a scripted one."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from canter.errors import GatewayUnavailable, GraderError
from canter.graders import GraderExit, Grading
from canter.graders.gateway import Gateway
from canter.graders.run import main, verdict

ROW = {
    "task": {"id": "t", "prompt": "p", "input": {}, "hidden": {"answer": "42"}},
    "outcome": "exited",
    "exit_code": 0,
    "process": {},
    "last_message": "42",
    "calls": 1,
}


class Script(HTTPServer):
    """Answers with `grading`, and to rewards with the next of `statuses` (then 200). Keeps what was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.grading: dict[str, Any] = dict(ROW)
        self.statuses: list[int] = []
        self.got: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Script

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: Any) -> None:
        self.server.got.append((self.path, self.headers["authorization"], body))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status == 0:  # the connection breaks, after the request has arrived
            self.close_connection = True
            return
        reply = json.dumps(self.server.grading if body is None else {"error": {"message": "said no"}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def told(script: Script, tmp_path: Path) -> dict[str, Any]:
    for name in ("work", "private"):
        (tmp_path / name).mkdir()
    (tmp_path / "grade.sh").touch()
    return {
        "gateway": script.url,
        "key": "grader-key",
        "rollout_id": "r",
        "attempt": 2,
        "folder": str(tmp_path),
        "private": str(tmp_path / "private"),
        "base": str(tmp_path),
        "answer": "last_message",
        "tolerance": 0.0,
        "retry_s": 2.0,
    }


def end(told: dict[str, Any]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(told)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_it_asks_and_posts_with_its_own_key(script: Script, told: dict[str, Any]) -> None:
    assert end({**told, "use": "exact"}) == GraderExit.POSTED
    (asked, key, _), (posted, same_key, body) = script.got
    assert (asked, posted) == ("/api/rollouts/r/attempts/2/grading", "/api/rollouts/r/attempts/2/reward")
    assert key == same_key == "Bearer grader-key"
    assert body == {"value": 1.0, "source": "grader", "details": {}}


def grade(grading: Grading) -> dict[str, object]:
    assert grading.hidden == {"answer": "42"}
    return {"value": 0.5, "path": str(grading.dir)}


def explode(grading: Grading) -> float:
    raise RuntimeError("two\nlines")


def test_a_function_gets_the_grading_and_gives_details(script: Script, told: dict[str, Any]) -> None:
    assert end({**told, "function": f"{__name__}:grade"}) == GraderExit.POSTED
    assert script.got[1][2] == {"value": 0.5, "source": "grader", "details": {"path": f"{told['folder']}/work"}}


def complain(grading: Grading) -> float:
    sys.stderr.write("half a line")
    return float("nan")


def test_a_reason_stands_on_a_line_of_its_own(told: dict[str, Any], capfd: Any) -> None:
    assert end({**told, "function": f"{__name__}:complain"}) == GraderExit.FAILED
    assert capfd.readouterr().err.splitlines() == [
        "half a line",
        f"{__name__}:complain must give a finite number, got nan",
    ]


@pytest.mark.parametrize(
    ("stderr", "said"),
    [("Traceback:\n  …\nRuntimeError: my bug\n", "its last words: RuntimeError: my bug"), ("\n", "it said nothing")],
)
def test_before_any_call_the_harness_has_the_last_word(
    script: Script, told: dict[str, Any], tmp_path: Path, capfd: Any, stderr: str, said: str
) -> None:
    folder = tmp_path / "attempts" / "a%2Fb" / "2"
    (folder / "work").mkdir(parents=True)
    (folder / "stderr.txt").write_text(stderr)
    script.grading = {**ROW, "calls": 0, "exit_code": 1}
    assert end({**told, "use": "exact", "folder": str(folder)}) == GraderExit.NO_CALLS
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"the harness ended with exit code 1 before any answered call; {said} (attempts/a%2Fb/2/stderr.txt)"
    )


def test_a_function_that_raises_says_so_in_the_last_line(told: dict[str, Any], capfd: Any) -> None:
    assert end({**told, "function": f"{__name__}:explode"}) == GraderExit.FAILED
    assert capfd.readouterr().err.splitlines()[-1] == f"{__name__}:explode raised RuntimeError: two lines"


SEE = "import json, os; g = json.load(open(os.environ['CANTER_GRADING'])); print(len(g['task']['hidden'])); "


@pytest.mark.parametrize(
    ("script_text", "value"),
    [
        (SEE + "print(0.25)", {"value": 0.25, "details": {}}),
        (SEE + "print(json.dumps({'value': 1, 'passed': 3}))", {"value": 1.0, "details": {"passed": 3}}),
        ("print('{base} {dir}'); print(1)", {"value": 1.0, "details": {}}),
    ],
)
def test_a_command(script: Script, told: dict[str, Any], script_text: str, value: dict[str, Any]) -> None:
    assert end({**told, "command": [sys.executable, "-c", script_text]}) == GraderExit.POSTED
    assert script.got[1][2] == {"source": "grader", **value}
    assert sorted(os.listdir(told["private"])) == [
        "command.txt",
        "stderr.txt",
    ]  # the hidden part is gone with the grader
    if "base" in script_text:
        assert (Path(told["private"]) / "command.txt").read_text().split()[0] == told["base"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sh", "-c", "echo 1; exit 3"], "grader.command ended with exit code 3: it said nothing"),
        (["sh", "-c", "printf 'a\\nno pytest' >&2; exit 3"], "grader.command ended with exit code 3: no pytest"),
        (["sh", "-c", "true"], "printed nothing; its last line must be the reward"),
        (["sh", "-c", "echo good"], "must be a number or {'value': …}, got 'good'"),
        (["sh", "-c", "echo NaN"], "must give a finite number, got nan"),
        (["sh", "-c", "echo '{\"score\": 1}'"], "its object has no key 'value', only ['score']"),
        (["no-such-grader"], "cannot start 'no-such-grader': No such file or directory; install it"),
        (["./grade.sh"], "it lies beside the TOML file, which is not searched: write '{base}/grade.sh'"),
    ],
)
def test_a_command_that_gives_no_reward(told: dict[str, Any], capfd: Any, argv: list[str], message: str) -> None:
    assert end({**told, "command": argv}) == GraderExit.FAILED
    assert message in capfd.readouterr().err.splitlines()[-1]
    assert "grading.json" not in os.listdir(told["private"])


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"calls": 0, "exit_code": 1}, GraderExit.NO_CALLS),
        ({"calls": 0, "exit_code": 0}, GraderExit.POSTED),
        ({"calls": 1, "exit_code": 1}, GraderExit.POSTED),
        ({"calls": 0, "exit_code": None, "outcome": "timed_out"}, GraderExit.POSTED),
    ],
)
def test_who_failed_before_any_call_gets_no_reward(
    script: Script, told: dict[str, Any], row: dict[str, Any], code: GraderExit
) -> None:
    script.grading = {**ROW, **row}
    assert end({**told, "use": "exact"}) == code
    assert len(script.got) == (2 if code is GraderExit.POSTED else 1)


@pytest.mark.parametrize("result", [1, True, 0.5, "0.5", {"value": -1.0}])
def test_numbers(result: Any) -> None:
    value, details = verdict(result, by="g")
    assert value == float(result["value"] if isinstance(result, dict) else result)
    assert details == {}


@pytest.mark.parametrize(
    "result", [None, "good", float("inf"), {"value": None}, {}, [1], 10**400], ids=lambda result: repr(result)[:20]
)
def test_no_numbers(result: Any) -> None:
    with pytest.raises(GraderError, match="g must give a finite number"):
        verdict(result, by="g")


def test_a_gateway_that_is_away_is_waited_for(script: Script, told: dict[str, Any]) -> None:
    script.statuses = [503, 0, 502]
    assert end({**told, "use": "exact"}) == GraderExit.POSTED
    assert len(script.got) == 5


def test_a_gateway_that_stays_away(told: dict[str, Any]) -> None:
    with pytest.raises(GatewayUnavailable, match="refused"):
        Gateway("http://127.0.0.1:9", "key", "r", 1, retry_s=0.1).grading()
    assert (
        end({**told, "use": "exact", "gateway": "http://127.0.0.1:9", "retry_s": 0.1}) == GraderExit.GATEWAY_UNAVAILABLE
    )


def test_a_reward_whose_reply_was_lost_is_posted(script: Script, told: dict[str, Any]) -> None:
    """The first request was carried out: the rollout is scored, and the grader's key has ended with it."""
    script.statuses = [200, 0, 401]
    assert end({**told, "use": "exact"}) == GraderExit.POSTED


@pytest.mark.parametrize("status", [401, 403, 409, 422])
def test_a_refused_reward_is_a_failure(script: Script, told: dict[str, Any], capfd: Any, status: int) -> None:
    script.statuses = [200, status]
    assert end({**told, "use": "exact"}) == GraderExit.FAILED
    assert f"the gateway answered {status}" in capfd.readouterr().err
