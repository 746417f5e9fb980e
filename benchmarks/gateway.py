"""What a recorded call costs the gateway: CPU, memory and disk, measured from outside its process.

Pass-through: the gateway in front of a fake upstream, every call committed (SQLite, `synchronous=FULL`) before its
reply. Its floors in the same run: the upstream itself, and a relay that is the same HTTP server and client with
nothing in between; `cpu_over_relay` is the ratio that does not depend on the machine. Token mode: one conversation
that grows by 300 tokens a call to beyond 30,000, rendered, sampled by the fake engine and parsed.

    python benchmarks/gateway.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop
from gateway_parts.load import Load, chat_body, cpu_s, load, resident_kb
from gateway_parts.process import MODEL, START_TOKENS, TURN_TOKENS

PARTS = Path(__file__).parent / "gateway_parts"
CASES = {"small": (1_000, 64, 16), "large": (200_000, 30_000, 500)}
ROLLOUTS = 64
UNITS = {
    "calls": "calls",
    "cpu_ms_per_call": "ms",
    "relay_cpu_ms_per_call": "ms",
    "cpu_over_relay": "ratio",
    "resident_kb_per_call": "KiB",
    "calls_per_s": "calls/s",
    "p50_ms": "ms",
    "p99_ms": "ms",
    "direct_calls_per_s": "calls/s",
    "direct_p50_ms": "ms",
    "p50_over_direct": "ratio",
    "final_prompt_tokens": "tokens",
    "first_call_cpu_ms": "ms",
    "first_call_stored_bytes": "bytes",
    "stored_bytes_per_call_first_half": "bytes",
    "stored_bytes_per_call_second_half": "bytes",
}


@dataclass(frozen=True)
class Gateway:
    """A gateway process: where it listens, and the agent keys of its rollouts."""

    pid: int
    url: str
    keys: list[str]

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port


@contextmanager
def child(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A Python process and the first line that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"{argv[0]} did not start")
        yield process, line
    finally:
        process.terminate()
        process.wait(timeout=20)


@contextmanager
def gateway(mode: str, folder: str, upstream: str = "") -> Iterator[Gateway]:
    with child(str(PARTS / "process.py"), mode, folder, upstream, str(ROLLOUTS)) as (process, line):
        told = json.loads(line)
        yield Gateway(process.pid, told["url"], told["keys"])


async def measure_case(
    name: str, upstream_port: int, relay: Gateway, target: Gateway, connections: int, calls: int
) -> dict[str, float | int | str]:
    """One case at one concurrency: straight to the upstream, through the relay, and through the gateway."""
    size, prompt_tokens, tokens = CASES[name]
    body = chat_body(MODEL, size, prompt_tokens, tokens)
    path = "/v1/chat/completions"
    floor = min(calls, 1000)
    direct = await load("127.0.0.1", upstream_port, path, body, ["none"], connections=connections, calls=floor)
    relay_cpu = cpu_s(relay.pid)
    relayed = await load(*relay.address, path, body, relay.keys, connections=connections, calls=floor)
    relay_ms = 1000 * (cpu_s(relay.pid) - relay_cpu) / relayed.calls
    await load(*target.address, path, body, target.keys, connections=connections, calls=8 * len(target.keys))
    before_cpu, before_kb = cpu_s(target.pid), resident_kb(target.pid)
    through = await load(*target.address, path, body, target.keys, connections=connections, calls=calls)
    _check(through)
    cpu_ms = 1000 * (cpu_s(target.pid) - before_cpu) / through.calls
    return {
        "case": name,
        "connections": connections,
        "calls": through.calls,
        "cpu_ms_per_call": round(cpu_ms, 3),
        "relay_cpu_ms_per_call": round(relay_ms, 3),
        "cpu_over_relay": round(cpu_ms / relay_ms, 2),
        "resident_kb_per_call": round((resident_kb(target.pid) - before_kb) / through.calls, 3),
        "calls_per_s": round(through.calls_per_s, 1),
        "p50_ms": round(through.p50_ms, 2),
        "p99_ms": round(through.p99_ms, 2),
        "direct_calls_per_s": round(direct.calls_per_s, 1),
        "direct_p50_ms": round(direct.p50_ms, 2),
        "p50_over_direct": round(through.p50_ms / direct.p50_ms, 1),
    }


def _check(result: Load) -> None:
    if result.errors:
        raise SystemExit(f"{result.errors} of {result.calls} calls failed, the first with: {result.first_error}")


async def measure_passthrough(calls: dict[str, int]) -> list[dict[str, Any]]:
    rows = []
    with child(str(PARTS / "upstream.py")) as (_, port):
        url = f"http://127.0.0.1:{port}/v1"
        for name, count in calls.items():
            with (
                TemporaryDirectory() as folder,
                gateway("relay", folder, url) as relay,
                gateway("passthrough", folder, url) as target,
            ):
                for connections in (1, 16, 64):
                    rows.append(await measure_case(name, int(port), relay, target, connections, count))
    return rows


async def measure_tokens(turns: int) -> dict[str, Any]:
    """CPU of each call of a growing conversation, and how the database grows in its first and second half."""
    runs = [await converse(count) for count in (0, turns // 2, turns)]
    cpu = runs[-1].cpu_s
    sizes = [run.database_bytes for run in runs]
    return {
        "case": "tokens",
        "calls": turns,
        "final_prompt_tokens": runs[-1].prompt_tokens,
        "first_call_cpu_ms": round(1000 * cpu[0], 1),
        "cpu_ms_per_call": round(1000 * sum(cpu[1:]) / turns, 3),
        "first_call_stored_bytes": sizes[0],
        "stored_bytes_per_call_first_half": round((sizes[1] - sizes[0]) / (turns // 2)),
        "stored_bytes_per_call_second_half": round((sizes[2] - sizes[1]) / (turns - turns // 2)),
    }


@dataclass(frozen=True)
class Conversation:
    """What a conversation took: CPU of each call, the last prompt, and the database once its process has ended."""

    cpu_s: list[float]
    prompt_tokens: int
    database_bytes: int


async def converse(turns: int) -> Conversation:
    """A first call with 30,000 tokens, then `turns` more that each add 300."""
    filler = "word " * (TURN_TOKENS // 2)
    messages = [{"role": "system", "content": "You work in a shell."}]
    while len(messages) * TURN_TOKENS / 2 < START_TOKENS:
        messages += [{"role": "user", "content": f"{len(messages)} {filler}"}, {"role": "assistant", "content": filler}]
    messages.append({"role": "user", "content": filler})
    cpu: list[float] = []
    with TemporaryDirectory() as folder:
        with gateway("tokens", folder) as target:
            headers = {"authorization": f"Bearer {target.keys[0]}"}
            async with aiohttp.ClientSession(target.url, headers=headers) as http:
                for turn in range(turns + 1):
                    before = cpu_s(target.pid)
                    async with http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}) as answer:
                        reply = await answer.json()
                    if answer.status != 200:
                        raise SystemExit(f"call {turn} failed: {reply}")
                    cpu.append(cpu_s(target.pid) - before)
                    messages += [reply["choices"][0]["message"], {"role": "user", "content": f"{turn} {filler}"}]
        size = (Path(folder) / "canter.db").stat().st_size
    return Conversation(cpu, reply["usage"]["prompt_tokens"], size)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of named figures with units")
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    args = parser.parse_args()
    scale = 10 if args.quick else 1
    rows = await measure_passthrough({"small": 5000 // scale, "large": 5000 // scale})
    rows.append(await measure_tokens(20 if args.quick else 100))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.json:
        print(json.dumps(figures(rows)))


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Named figures with their units."""
    named: dict[str, Any] = {}
    for row in rows:
        at = f"_at_{row['connections']}" if "connections" in row else ""
        measured = {name: value for name, value in row.items() if name not in ("case", "connections")}
        named |= {f"{row['case']}{at}_{name}": {"value": v, "unit": UNITS[name]} for name, v in measured.items()}
    return named


if __name__ == "__main__":
    uvloop.run(main())
