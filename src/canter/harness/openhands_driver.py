"""Runs one OpenHands agent in the current folder.

Run by the Python that has `openhands-sdk`; imports nothing of Canter. Its one argument is JSON: `model`, `base_url`,
`api`, `cli_mode`, `sub_agents`, `system_prompt` (or null), `max_iterations`, `timeout_s`, `max_input_tokens` (or null),
`max_output_tokens`. The task comes from the file `$CANTER_TASK`, the key from the environment. Exit code 0 when the
agent has finished, 1 when it ran into a limit, got stuck or failed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.preset.default import get_default_agent, register_builtins_agents


def main(argument: str) -> int:
    told: dict[str, Any] = json.loads(argument)
    task = json.loads(Path(os.environ["CANTER_TASK"]).read_text(encoding="utf-8"))
    conversation = Conversation(
        agent=make_agent(told),
        workspace=os.getcwd(),
        max_iteration_per_run=told["max_iterations"],
        visualizer=None,
    )
    try:
        conversation.send_message(str(task["prompt"]))
        conversation.run()
        status = conversation.state.execution_status.value
    finally:
        conversation.close()
    sys.stdout.write(f"conversation: {status}\n")
    return 0 if status == "finished" else 1


def make_agent(told: dict[str, Any]) -> Agent:
    """The agent that the SDK has for a terminal, in its own default settings but for what was told."""
    llm = LLM(
        model=told["model"],
        base_url=told["base_url"],
        api_key=os.environ["OPENAI_API_KEY"],
        api_mode=told["api"],
        usage_id="agent",
        timeout=told["timeout_s"],
        max_input_tokens=told["max_input_tokens"],
        max_output_tokens=told["max_output_tokens"],
        input_cost_per_token=0.0,
        output_cost_per_token=0.0,
    )
    agent = get_default_agent(llm, cli_mode=told["cli_mode"])
    if told["sub_agents"]:
        from openhands.tools.task import TaskToolSet

        register_builtins_agents(enable_browser=not told["cli_mode"])
        agent = agent.model_copy(update={"tools": [*agent.tools, Tool(name=TaskToolSet.name)]})
    if told["system_prompt"] is not None:
        agent = agent.model_copy(update={"system_prompt": told["system_prompt"], "system_prompt_kwargs": {}})
    return agent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
