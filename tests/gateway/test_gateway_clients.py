"""What clients of other makers trip over: on the wire, in the SDKs, in what they send back."""

from __future__ import annotations

import asyncio
import http.client
import time

from gateway_rig import gateway


async def test_a_reply_on_a_connection_that_is_kept_alive_does_not_wait() -> None:
    def fastest(url: str, key: str) -> float:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        took = []
        for _ in range(20):
            began = time.monotonic()
            connection.request("POST", "/v1/responses", b'{"model":1}', {"authorization": f"Bearer {key}"})
            assert connection.getresponse().read()
            took.append(time.monotonic() - began)
        connection.close()
        return min(took[5:])

    async with gateway() as rig:
        assert await asyncio.to_thread(fastest, rig.url, rig.agent_key) < 0.03
