"""The quickstart recipe by itself: its tasks, its grader, and what the real mini-SWE-agent makes of its settings."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import jinja2
import pytest
import yaml

from canter.config import load
from canter.graders import Grading
from canter.types import Outcome, Task

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
MINI = yaml.safe_load((RECIPE / "mini.yaml").read_text())


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", RECIPE / f"{name}.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


tasks, grader = module("tasks"), module("grader")


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (RECIPE / name).read_text().splitlines()]


def repair(row: dict) -> tuple[str, str]:
    """The wrong operator of the file, and the right one by the hidden cases."""
    wrong = row["input"]["files"]["f.py"].split()[-2]
    right = [o for o, f in tasks.OPERATORS.items() if all(f(a, b) == v for a, b, v in row["hidden"]["cases"])]
    assert len(right) == 1, "the hidden cases tell the operators apart"
    return wrong, right[0]


def test_settings_load_and_name_files_that_are_there() -> None:
    config = load(RECIPE / "quickstart.toml")
    for name in (config.tasks.train, config.tasks.eval, config.model.chat_template, config.harness.args["config"]):
        assert config.path(name).is_file()
    assert config.grader.function == "grader:grade"
    assert config.evaluate.before
    assert config.evaluate.after
    assert len(rows("train.jsonl")) >= config.trainer.steps * config.trainer.groups, "no task is seen twice"


def test_committed_tasks_are_what_the_generator_writes(tmp_path: Path) -> None:
    tasks.write(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (RECIPE / name).read_bytes()


def test_heldout_names_and_repairs_are_never_seen_in_training() -> None:
    train, heldout = rows("train.jsonl"), rows("heldout.jsonl")
    assert {r["hidden"]["name"] for r in train}.isdisjoint({r["hidden"]["name"] for r in heldout})
    assert {repair(r) for r in train}.isdisjoint({repair(r) for r in heldout})
    assert {repair(r) for r in heldout} == tasks.HELDOUT_REPAIRS
    shown = (RECIPE / "chat_template.jinja").read_text()
    for row in heldout:
        assert row["hidden"]["name"] + "(" not in shown
        wrong, right = repair(row)
        assert not (f"a {wrong} b\\n" in shown and f"a {right} b'" in shown)


def test_ids_are_unique_and_hidden_values_stay_hidden() -> None:
    every = rows("train.jsonl") + rows("heldout.jsonl")
    assert len({r["id"] for r in every}) == len(every)
    for row in every:
        assert all(f"({a}, {b})" not in row["prompt"] for a, b, _ in row["hidden"]["cases"])


TASK = Task(
    "t",
    "f.py is wrong",
    {"files": {"f.py": "def minus(a, b): return a + b\n"}},
    {"name": "minus", "cases": [[5, 3, 2], [9, 2, 7]]},
)


def grading(work: Path) -> Grading:
    return Grading(
        task=TASK,
        answer="solved, trust me",
        dir=work,
        stdout=work / "stdout.txt",
        stderr=work / "stderr.txt",
        outcome=Outcome.EXITED,
        exit_code=0,
        calls=1,
    )


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("def minus(a, b): return a - b\n", 1.0),
        ("def minus(a,b):return a-b", 1.0),
        ("# repaired\ndef minus(x, y):\n\n    return (x - y)  # so\n", 1.0),
        ("def minus(a: int, b: int) -> int: return a - b", 1.0),
        ("def minus(b, a): return b - a", 1.0),
        ("def minus(a, b): return a * b\n", 0.1),
        ("def minus(a, b): return b - a\n", 0.1),
        ("def minus(a, b):  return a + b\n", 0.1),
        ("def minus(a, b): return a + b\n", 0.0),
        ("def plus(a, b): return a - b\n", 0.0),
        ("def minus(a): return a - a\n", 0.0),
        ("def minus(a, b=1): return a - b\n", 0.0),
        ("def minus(a, b, *c): return a - b\n", 0.0),
        ("def minus(a, b): return a ** b\n", 0.0),
        ("def minus(a, b): return a - c\n", 0.0),
        ("def minus(a, b): return 2\n", 0.0),
        ("def minus(a, b): return {5: 2, 9: 7}[a]\n", 0.0),
        ("def minus(a, b): print(a - b)\n", 0.0),
        ("def minus(a, b): return a -\n", 0.0),
        ("def minus(a, b): return a - b\nraise SystemExit\n", 0.0),
        ("import os; os._exit(0)\ndef minus(a, b): return a - b\n", 0.0),
        ("@__import__('os').system\ndef minus(a, b): return a - b\n", 0.0),
        ("async def minus(a, b): return a - b\n", 0.0),
        ("minus = lambda a, b: a - b\n", 0.0),
        ("def minus(a, b): return a - b\0\n", 0.0),
        ("def minus(a, b): return '\\d' - b\n", 0.0),
        ("(" * 4000, 0.0),
        ("-" * 4000 + "1", 0.0),
        ("", 0.0),
    ],
)
def test_grader_judges_the_file(tmp_path: Path, text: str, reward: float) -> None:
    (tmp_path / "f.py").write_text(text)
    assert grader.grade(grading(tmp_path)) == reward


def test_grader_takes_only_a_small_regular_file(tmp_path: Path) -> None:
    file, right = tmp_path / "f.py", "def minus(a, b): return a - b\n"
    assert grader.grade(grading(tmp_path)) == 0, "missing"
    file.write_text(right + "#" * 10_000)
    assert grader.grade(grading(tmp_path)) == 0, "too large"
    file.write_bytes(b"\xff" + right.encode())
    assert grader.grade(grading(tmp_path)) == 0, "not text"
    file.unlink()
    (tmp_path / "other.py").write_text(right)
    file.symlink_to(tmp_path / "other.py")
    assert grader.grade(grading(tmp_path)) == 0, "a link"
    file.unlink()
    os.mkfifo(file)
    assert grader.grade(grading(tmp_path)) == 0, "a pipe that nobody writes"
    file.unlink()
    file.mkdir()
    assert grader.grade(grading(tmp_path)) == 0, "a folder"


GOOD = "echo 'def minus(a, b): return a - b' > f.py"


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        (GOOD, GOOD),
        (f"\n  {GOOD} \n", GOOD),
        ("echo 'a * b; rm -rf / && $(reboot) `x`' > f.py", "echo 'a * b; rm -rf / && $(reboot) `x`' > f.py"),
        (f"Sure:\n{GOOD}", None),
        (f"{GOOD}; rm -rf ~", None),
        (f"{GOOD} && ls", None),
        (f"{GOOD}\nrm -rf ~", None),
        (f"{GOOD}\n{GOOD}", None),
        ("echo 'x' 'y' > f.py", None),
        ('echo "$(rm -rf ~)" > f.py', None),
        ("echo 'x' > ../f.py", None),
        ("echo 'x' > f.pyc", None),
        ("echo 'x' >> f.py", None),
        ("echo 'two\nlines' > f.py", None),
        ("rm -rf ~", None),
        ("", None),
    ],
)
def test_only_the_one_harmless_command_is_ever_an_action(
    reply: str, command: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    from minisweagent.exceptions import FormatError
    from minisweagent.models.utils.actions_text import parse_regex_actions

    settings = {k: MINI["model"][k] for k in ("action_regex", "format_error_template")}
    if command is None:
        with pytest.raises(FormatError):
            parse_regex_actions(reply, **settings)
    else:
        assert parse_regex_actions(reply, **settings) == [{"command": command}]


class Model(BaseHTTPRequestHandler):
    """Answers every chat request with `GOOD` and keeps what it was asked."""

    asked: list[dict]

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        message = {"role": "assistant", "content": GOOD}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test's output clean."""


def test_the_real_agent_asks_once_and_its_one_command_repairs_the_file(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "f.py").write_text(TASK.input["files"]["f.py"])
    prompt = "f.py is wrong: def minus(a, b): return a + b\nExpected: minus(9, 2) == 7"
    handler = type("Asked", (Model,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            ended = run_mini(work, tmp_path, prompt, f"http://127.0.0.1:{server.server_port}/v1")
        finally:
            server.shutdown()
            thread.join()
    assert ended["info"]["exit_status"] == "LimitsExceeded"
    assert [request["messages"] for request in handler.asked] == [
        [{"role": "system", "content": MINI["agent"]["system_template"]}, {"role": "user", "content": prompt}]
    ]
    assert not handler.asked[0].keys() & {"tools", "stream", "max_tokens", "temperature"}
    assert grader.grade(grading(work)) == 1.0


def run_mini(work: Path, home: Path, prompt: str, url: str) -> dict:
    """Runs the `mini` program in a folder and returns its trajectory."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "MSWEA_GLOBAL_CONFIG_DIR": str(home / "mini"),
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": "key",
    }
    argv = [sys.executable, "-m", "minisweagent.run.mini", "-y", "--exit-immediately", "-m", "openai/policy"]
    argv += ["-t", prompt, "-o", str(home / "trajectory.json"), "-c", str(RECIPE / "mini.yaml")]
    done = subprocess.run(
        argv,
        check=False,
        stdin=subprocess.DEVNULL,
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trajectory: dict = json.loads((home / "trajectory.json").read_text())
    return trajectory


def test_chat_template_shows_the_example_between_system_and_task() -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (RECIPE / "chat_template.jinja").read_text()
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Now this."}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nf.py is wrong: def minus(a, b): return a + b\nExpected: minus(5, 3) == 2<|im_end|>\n"
        "<|im_start|>assistant\necho 'def minus(a, b): return a - b' > f.py<|im_end|>\n"
        "<|im_start|>user\nNow this.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    later = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    whole = template.render(messages=messages + later, add_generation_prompt=False)
    first = template.render(messages=messages, add_generation_prompt=False)
    assert whole == first + template.render(messages=later, add_generation_prompt=False), "later turns render alone"
