"""Agents of a team's own, for tests of `canter harness check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def good(task: dict[str, Any]) -> None:
    """A loop over tool calls."""
    model, messages = os.environ["CANTER_MODEL"], [{"role": "user", "content": task["prompt"]}]
    with openai.OpenAI() as client:
        while True:
            answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL]).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                return
            for call in answer.tool_calls:
                command = json.loads(call.function.arguments)["command"]
                done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=10, check=False)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": done.stdout})


def silent(task: dict[str, Any]) -> None:
    sys.stdout.write("nothing to do\n")


def insistent(task: dict[str, Any]) -> None:
    """Asks for a model that this run does not have."""
    with openai.OpenAI(max_retries=0) as client:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])


def endless(task: dict[str, Any]) -> None:
    time.sleep(60)


def fails_at_the_end(task: dict[str, Any]) -> None:
    good(task)
    raise SystemExit(7)
