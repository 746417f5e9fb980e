"""What a recorded call costs the gateway: CPU, memory and disk, measured from outside its process.

Pass-through: the gateway in front of a fake upstream, every call committed (SQLite, `synchronous=FULL`) before its
reply; the same load straight to the upstream is the floor. Token mode: one conversation that grows by 300 tokens a
call to beyond 30,000, rendered, sampled by the fake engine and parsed.

    python benchmarks/gateway.py [--json] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
from _gateway_process import MODEL, START_TOKENS, TURN_TOKENS
from _load import Load, chat_body, cpu_s, load, resident_kb

HERE = Path(__file__).parent
CASES = {"small": (1_000, 64, 16), "large": (200_000, 30_000, 500)}
ROLLOUTS = 64


@dataclass(frozen=True)
class Gateway:
    """A gateway process: where it listens, the agent keys of its rollouts, and its store's folder."""

    pid: int
    url: str
    keys: list[str]
    folder: Path

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname and parts.port
        return parts.hostname, parts.port

    def stored_bytes(self) -> int:
        """Of the database and its log together."""
        return sum(file.stat().st_size for file in self.folder.iterdir())


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
def gateway(mode: str, upstream: str) -> Iterator[Gateway]:
    folder = Path(tempfile.mkdtemp(prefix="canter-bench-"))
    try:
        with child(str(HERE / "_gateway_process.py"), mode, str(folder), upstream, str(ROLLOUTS)) as (process, line):
            told = json.loads(line)
            yield Gateway(process.pid, told["url"], told["keys"], folder)
    finally:
        shutil.rmtree(folder)


async def measure_case(
    name: str, upstream_port: int, target: Gateway, connections: int, calls: int
) -> dict[str, float | int | str]:
    """One case at one concurrency: through the gateway and straight to the upstream."""
    size, prompt_tokens, tokens = CASES[name]
    body = chat_body(MODEL, size, prompt_tokens, tokens)
    host, port = target.address
    path = "/v1/chat/completions"
    direct = await load("127.0.0.1", upstream_port, path, body, ["none"], connections=connections, calls=min(calls, 1000))
    await load(host, port, path, body, target.keys, connections=8, calls=3 * len(target.keys))
    before_cpu, before_kb, before_disk = cpu_s(target.pid), resident_kb(target.pid), target.stored_bytes()
    through = await load(host, port, path, body, target.keys, connections=connections, calls=calls)
    _check(through)
    return {
        "case": name,
        "connections": connections,
        "calls": through.calls,
        "cpu_ms_per_call": round(1000 * (cpu_s(target.pid) - before_cpu) / through.calls, 3),
        "resident_kb_per_call": round((resident_kb(target.pid) - before_kb) / through.calls, 3),
        "stored_bytes_per_call": round((target.stored_bytes() - before_disk) / through.calls),
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
    with child(str(HERE / "_upstream.py")) as (_, port):
        for name in CASES:
            with gateway("passthrough", f"http://127.0.0.1:{port}/v1") as target:
                for connections in (1, 16, 64):
                    rows.append(await measure_case(name, int(port), target, connections, calls[name]))
    return rows


async def measure_tokens(turns: int) -> dict[str, Any]:
    """A conversation that begins with 30,000 tokens and grows by 300 a call."""
    import aiohttp

    filler = "word " * (TURN_TOKENS // 2)
    messages: list[dict[str, str]] = [{"role": "system", "content": "You work in a shell."}]
    while sum(len(m["content"]) for m in messages) < 5 * START_TOKENS:  # each filler word is one token
        messages += [{"role": "user", "content": f"{len(messages)} {filler}"}, {"role": "assistant", "content": filler}]
    messages.append({"role": "user", "content": filler})
    with gateway("tokens", "") as target:
        headers = {"authorization": f"Bearer {target.keys[0]}"}
        cpu: list[float] = []
        stored: list[int] = []
        prompt_tokens = 0
        async with aiohttp.ClientSession(target.url, headers=headers) as http:
            for turn in range(turns + 1):
                before = cpu_s(target.pid), target.stored_bytes()
                async with http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}) as response:
                    reply = await response.json()
                    if response.status != 200:
                        raise SystemExit(f"call {turn} failed: {reply}")
                cpu.append(cpu_s(target.pid) - before[0])
                stored.append(target.stored_bytes() - before[1])
                prompt_tokens = reply["usage"]["prompt_tokens"]
                messages += [reply["choices"][0]["message"], {"role": "user", "content": f"{turn} {filler}"}]
    return {
        "case": "tokens",
        "calls": turns,
        "final_prompt_tokens": prompt_tokens,
        "first_call_cpu_ms": round(1000 * cpu[0], 1),
        "cpu_ms_per_call": round(1000 * sum(cpu[1:]) / turns, 3),
        "stored_bytes_per_call": round(sum(stored[1:]) / turns),
        "stored_bytes_per_call_first_half": round(sum(stored[1 : turns // 2 + 1]) / (turns // 2)),
        "stored_bytes_per_call_second_half": round(sum(stored[turns // 2 + 1 :]) / (turns - turns // 2)),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON object of all figures")
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    args = parser.parse_args()
    scale = 10 if args.quick else 1
    rows = await measure_passthrough({"small": 5000 // scale, "large": 5000 // scale})
    rows.append(await measure_tokens(100 // (5 if args.quick else 1)))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.json:
        print(json.dumps(summary(rows)))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Named figures with their units."""
    figures: dict[str, Any] = {}
    for row in rows:
        at = f"_at_{row['connections']}" if "connections" in row else ""
        figures |= {f"{row['case']}{at}_{name}": row[name] for name in row if name not in ("case", "connections")}
    return figures


if __name__ == "__main__":
    uvloop.run(main())
