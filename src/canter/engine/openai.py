"""Pass-through to an OpenAI-compatible server that returns token ids (`return_token_ids`, as vLLM does).

The third, weaker way to an engine: the server renders the prompt and parses the reply; its ids and logprobs are
recorded as it gives them. Nothing here renders or tokenises.
"""

from __future__ import annotations

import array
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import orjson
from yarl import URL

from canter.engine.origin import Origin, Response
from canter.errors import BadRequest, ContextOverflow, EngineError, EngineUnavailable
from canter.types import NO_IDS, NO_LOGPROBS, FinishReason, Generation, Ids, Logprobs, VersionSpan

Route = Literal["/chat/completions", "/completions"]
_ROUTES: tuple[Route, ...] = get_args(Route)

_PROMPT_IDS = b'"prompt_token_ids":['
_LIMIT = re.compile(r"maximum (?:context|model) length (?:is|of) (\d{1,12})")
_NUMBER = re.compile(r"\b\d{1,12}\b")
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "tool_calls": FinishReason.TOOL_CALLS}


@dataclass(frozen=True, slots=True)
class Completion:
    """What the server answered: its JSON without the token ids, the prompt's ids (none if it gave none), and what it
    sampled. `generation.versions` is empty where the policy version is not known."""

    reply: dict[str, Any]
    prompt: Ids
    generation: Generation


class OpenAIEngine:
    """One OpenAI-compatible server; `url` is its base URL, e.g. `http://127.0.0.1:8000/v1`.

    `version` is the policy version that it serves now, `None` where nobody said so. `model` is its own name for the
    model. `timeout_s` is the deadline of one completion.
    """

    def __init__(
        self, url: str, key: str = "", *, model: str, version: int | None = None, timeout_s: float = 600
    ) -> None:
        self.url = url.rstrip("/")
        self.model = model
        self.version = version
        base = URL(self.url)
        self._paths = {route: base.raw_path.rstrip("/") + route for route in _ROUTES}
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        self._origin = Origin(base, {"content-type": "application/json", **authorization})
        self._timeout_s = timeout_s

    async def complete(self, route: Route, body: Mapping[str, Any]) -> Completion:
        """Sends a request that does not stream, asking for token ids and logprobs besides.

        Raises `EngineUnavailable` where the server cannot be reached or is overloaded, `EngineError` where it fails,
        `BadRequest` where it refuses the request. Cancelling hangs up.
        """
        wanted = {
            **body,
            "model": self.model,
            "logprobs": True if route == "/chat/completions" else 0,
            "return_token_ids": True,
        }
        version = self.version
        response = await self._post(route, orjson.dumps(wanted))
        if response.status != 200:
            raise _refusal(response, self.url)
        try:
            return read_completion(response.body, version)
        except (orjson.JSONDecodeError, AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise EngineError(f"{self.url}{route} answered no completion: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        self._origin.close()

    async def _post(self, route: Route, data: bytes) -> Response:
        try:
            return await self._origin.post(self._paths[route], data, timeout_s=self._timeout_s)
        except TimeoutError as error:
            raise EngineError(f"{self.url}{route} did not answer within {self._timeout_s:g} s") from error
        except OSError as error:
            raise EngineUnavailable(f"{self.url} is not reachable: {error or type(error).__name__}") from error


def read_completion(data: bytes, version: int | None) -> Completion:
    """Takes the ids and logprobs out of a reply. Raises KeyError, TypeError and the like on anything malformed."""
    prompt, rest = _cut_prompt_ids(data)
    reply: dict[str, Any] = orjson.loads(rest)
    choice = reply["choices"][0]
    others = [of.pop("prompt_token_ids", None) for of in (reply, choice)]
    if prompt is None:
        prompt = _ids(others[0] or others[1])
    sampled = _ids(choice.pop("token_ids", None))
    finish = _FINISH.get(choice.get("finish_reason") or "stop", FinishReason.STOP)
    spans = () if version is None else (VersionSpan(version, 0, len(sampled)),)
    return Completion(reply, prompt, Generation(sampled, _logprobs(choice.get("logprobs")), finish, spans))


def _cut_prompt_ids(data: bytes) -> tuple[Ids | None, bytes]:
    """The prompt's ids and the JSON without them; `None` and the JSON as it is where they cannot be told apart.

    Tens of thousands of numbers are most of a reply: read in one go they cost half of what JSON costs. The name with
    its quotes cannot be part of a string, where quotes are escaped.
    """
    start = data.find(_PROMPT_IDS)
    end = data.find(b"]", start)
    if start < 0 or end < 0:
        return None, data
    start += len(_PROMPT_IDS)
    numbers = data[start:end]
    try:
        ids = np.fromstring(numbers, np.int32, sep=",")
    except (ValueError, DeprecationWarning):  # something that is no number; JSON will say what
        return None, data
    if len(ids) != numbers.count(b",") + 1:
        return None, data
    return ids, data[:start] + data[end:]


def _ids(values: list[int] | None) -> Ids:
    if not values:
        return NO_IDS
    return np.frombuffer(array.array("i", values), np.int32)  # three times as fast as np.array on a list


def _logprobs(found: Mapping[str, Any] | None) -> Logprobs:
    """Of the chat form (`content`, an entry a token) or the completions form (`token_logprobs`)."""
    if not found:
        return NO_LOGPROBS
    if found.get("token_logprobs") is not None:
        return np.array([np.nan if p is None else p for p in found["token_logprobs"]], np.float32)
    return np.array([entry["logprob"] for entry in found.get("content") or ()], np.float32)


def _refusal(response: Response, url: str) -> Exception:
    """The exception for an error reply of the server."""
    status, data = response.status, response.body
    try:
        error = orjson.loads(data)
        error = error.get("error", error)
        message = str(error["message"])
        code, param = error.get("code"), error.get("param")
    except (orjson.JSONDecodeError, KeyError, AttributeError, TypeError):
        message, code, param = data[:300].decode("utf-8", "replace"), None, None
    if status in (401, 403):
        return EngineUnavailable(f"{url} refuses the gateway's own key (gateway.upstream_key): {message}")
    if status in (429, 503):
        retry_after = response.headers.get(b"retry-after", b"")
        wait_s = int(retry_after) if retry_after.isdigit() else 2
        return EngineUnavailable(f"{url} is overloaded: {message}", retry_after_s=wait_s)
    if status < 400 or status >= 500 or status == 404:
        return EngineError(f"{url} answered {status}: {message}")
    if (found := _LIMIT.search(message)) is not None:
        limit = int(found[1])
        asked = max((int(n) for n in _NUMBER.findall(message) if int(n) > limit), default=None)
        return ContextOverflow(asked or limit + 1, limit, at_least=asked is None)
    return BadRequest(
        message, param=param if isinstance(param, str) else None, code=code if isinstance(code, str) else None
    )
