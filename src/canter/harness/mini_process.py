"""mini-SWE-agent inside the launcher: imported and rehearsed once, then run in a fork per attempt.

The rehearsal is one turn against a server of this process that answers nothing of use. Libraries that mini-SWE-agent
uses import and build much only at their first call (some 150 ms of CPU), which every attempt would pay again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import threading
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from minisweagent.run.mini import app

YAML = """
agent: {system_template: "Rehearse.", instance_template: "{{task}}", step_limit: 1}
model: {model_class: litellm_textbased}
environment: {environment_class: local}
"""


def run(argv: list[str]) -> None:
    """What `mini` does with this argv; ends with SystemExit."""
    app(args=argv, prog_name="mini")


class _Silence(BaseHTTPRequestHandler):
    """Answers every chat with a message that asks for no command."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "-"}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {
            "id": "-",
            "object": "chat.completion",
            "created": 0,
            "model": "-",
            "choices": [choice],
            "usage": usage,
        }
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("connection", "close")  # no connection is left for the forks to inherit
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


def rehearse() -> None:
    """One turn of mini-SWE-agent. Whatever goes wrong only costs the attempts the time that it would have saved."""
    server = HTTPServer(("127.0.0.1", 0), _Silence)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            config = Path(folder, "mini.yaml")
            config.write_text(YAML, encoding="utf-8")
            os.environ["OPENAI_API_KEY"] = "rehearsal"
            argv = ["-y", "--exit-immediately", "-m", "openai/policy", "-t", "rehearsal", "-o", f"{folder}/traj.json"]
            url = f"http://127.0.0.1:{server.server_address[1]}/v1"
            run([*argv, "-c", str(config), "-c", f"model.model_kwargs.api_base={url}"])
    except SystemExit:
        pass
    except Exception:
        traceback.print_exc()
        sys.stderr.write("the rehearsal failed; attempts work, but each takes longer to start\n")
    finally:
        os.environ.pop("OPENAI_API_KEY", None)
        server.shutdown()
        server.server_close()
        thread.join()


rehearse()
