"""The two requests of a grader, with the standard library alone, so that a grader's process stays light."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from canter.errors import GatewayUnavailable, GraderError

REQUEST_S = 30.0
_AWAY = frozenset({429, 502, 503, 504})


class Gateway:
    """The gateway for one attempt: `url` without `/v1`, the attempt's grader `key`.

    While it is away a request is repeated until `retry_s` have passed.
    """

    def __init__(self, url: str, key: str, rollout_id: str, attempt: int, *, retry_s: float) -> None:
        self._base = f"{url}/api/rollouts/{rollout_id}/attempts/{attempt}"
        self._key = key
        self._retry_s = retry_s
        # no proxies: the environment is not the user's, and keys stay on the way to the gateway
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def grading(self) -> dict[str, Any]:
        """The attempt with its task's hidden part. Raises GraderError or GatewayUnavailable."""
        return self._send("GET", "/grading", None)

    def post(self, value: float, details: dict[str, Any]) -> None:
        """Posts the reward. Raises GraderError or GatewayUnavailable."""
        self._send("POST", "/reward", {"value": value, "source": "grader", "details": details})

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        request = urllib.request.Request(self._base + path, data, headers, method=method)
        deadline, pause_s, repeated = time.monotonic() + self._retry_s, 0.05, False
        while True:
            try:
                with self._open(request, timeout=REQUEST_S) as response:
                    reply: dict[str, Any] = json.load(response)
                    return reply
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")
                if repeated and method == "POST" and error.code in (401, 409):
                    return {}  # the first one had arrived: a reward is final and ends the grader's key
                if error.code not in _AWAY:
                    raise GraderError(f"{method} {path}: the gateway answered {error.code}: {text[:500]}") from error
                problem = f"{error.code}: {text[:200]}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() + pause_s > deadline:
                raise GatewayUnavailable(f"{method} {self._base}{path}: {problem}")
            time.sleep(pause_s)
            pause_s, repeated = min(1.0, 2 * pause_s), True
