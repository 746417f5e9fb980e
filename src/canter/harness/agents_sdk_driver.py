"""Runs one agent of the OpenAI Agents SDK with a shell tool in the current folder.

Run by the Python that has `openai-agents`; imports nothing of Canter. Its one argument is JSON: `model`, `api`,
`stream`, `previous_response`, `instructions`, `max_turns`, `timeout_s`, `shell_timeout_s`. The task comes from the file
`$CANTER_TASK`, endpoint and key from the environment. Exit code 0 when the agent has answered, 1 otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from agents import Agent, FunctionTool, Runner, function_tool, set_default_openai_api, set_default_openai_client
from openai import AsyncOpenAI

_SHOWN_CHARS = 30_000


def main(argument: str) -> int:
    told: dict[str, Any] = json.loads(argument)
    task = json.loads(Path(os.environ["CANTER_TASK"]).read_text(encoding="utf-8"))
    set_default_openai_api(told["api"])
    set_default_openai_client(AsyncOpenAI(timeout=told["timeout_s"]), use_for_tracing=False)
    agent = Agent(
        name="agent",
        instructions=told["instructions"],
        model=told["model"],
        tools=[shell_tool(told["shell_timeout_s"])],
    )
    answer = asyncio.run(run(agent, str(task["prompt"]), told))
    sys.stdout.write(f"{answer}\n")
    return 0


async def run(agent: Agent[Any], prompt: str, told: dict[str, Any]) -> object:
    """The agent's final answer."""
    more: dict[str, Any] = {"max_turns": told["max_turns"]}
    if told["previous_response"]:
        more["auto_previous_response_id"] = True
    if not told["stream"]:
        return (await Runner.run(agent, prompt, **more)).final_output
    streamed = Runner.run_streamed(agent, prompt, **more)
    async for _ in streamed.stream_events():
        pass
    return streamed.final_output


def shell_tool(timeout_s: float) -> FunctionTool:
    async def shell(command: str) -> str:
        """Runs a bash command in the working folder and returns its exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            return f"exit code: none, it was killed after {timeout_s:g} s"
        text = printed.decode("utf-8", "replace")
        if len(text) > _SHOWN_CHARS:
            half = _SHOWN_CHARS // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
        return f"exit code: {process.returncode}\n{text}"

    tool: FunctionTool = function_tool(shell)
    return tool


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
