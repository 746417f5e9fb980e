"""The gateway against its own OpenAPI document: what it allows is answered, what it forbids is no error of ours."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
import schemathesis
from fuzz_rig import DOCUMENT, at_rest, send_all, validator
from gateway_rig import config, gateway
from hypothesis import HealthCheck, Phase, given, settings
from mutants import SEEDS, Mutant
from schemathesis import GenerationMode
from test_fuzz_mutants import BASES

from canter.gateway.dialects.routes import BY_PATH, COUNTS

EXAMPLES = 60
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
POSTS = [path for path, item in DOCUMENT["paths"].items() if "post" in item]

UNSAYABLE = (
    "is taken by another tool",  # two tools of one name
    "and so would another tool",
    "is none of the tools",  # tool_choice names one that is not there
    "tool_choice any needs tools",
    "tool_choice required needs tools",
    "the last message is the assistant's",
    "tool_choice.name is missing",
    "no item of a stored response",
    "messages hold no content",
    "Previous response with id",
    "is outside the vocabulary of",
    "input is missing or empty",  # all of its items are kept out
)
"""Refusals of requests that the document allows: what JSON Schema cannot say, and a description does."""


def generated(path: str, mode: GenerationMode, count: int) -> list[Any]:
    """Bodies that schemathesis makes from the document."""
    bodies: list[Any] = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMA[path]["POST"].as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        bodies.append(case.body)

    collect()
    return bodies


def plain(value: Any) -> Any:
    """With integers written as such: JSON Schema takes 1.0 for one, the gateway does not."""
    if isinstance(value, dict):
        return {name: plain(child) for name, child in value.items()}
    if isinstance(value, list):
        return [plain(child) for child in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def mutants_of(path: str, bodies: list[Any]) -> list[Mutant]:
    headers = {"content-type": "application/json"}
    return [
        Mutant(number, path, body if isinstance(body, bytes) else json.dumps(plain(body)).encode(), headers, ())
        for number, body in enumerate(bodies)
        if isinstance(body, bytes | dict | list | str | int | float | None)
    ]


@pytest.mark.parametrize("path", POSTS)
async def test_what_the_document_allows_is_answered(path: str) -> None:
    bodies = generated(path, GenerationMode.POSITIVE, EXAMPLES)
    async with gateway(settings=config(sampling={"max_tokens": 16})) as rig:
        seen = await send_all(rig, mutants_of(path, bodies), [rig.agent_key], expect=answered)
        await at_rest(rig)
    assert not seen.wrong, f"{len(seen.wrong)} of {len(bodies)}, the first:\n" + "\n".join(seen.wrong[:5])
    assert seen.statuses[200] > 0.2 * len(bodies), seen.statuses


def answered(status: int, body: bytes) -> bool:
    return status == 200 or (status == 400 and any(text in body.decode() for text in UNSAYABLE))


@pytest.mark.parametrize("path", BY_PATH)
async def test_what_the_document_forbids_is_no_error_of_ours(path: str) -> None:
    bodies = generated(path, GenerationMode.NEGATIVE, EXAMPLES)
    async with gateway(settings=config(sampling={"max_tokens": 16})) as rig:
        seen = await send_all(rig, mutants_of(path, bodies), [rig.agent_key])
        await at_rest(rig)
    assert not seen.wrong, f"{len(seen.wrong)} of {len(bodies)}, the first:\n" + "\n".join(seen.wrong[:5])
    assert seen.statuses[400] > 0.3 * len(bodies), seen.statuses


@pytest.mark.parametrize("path", SEEDS)
def test_what_real_harnesses_send_is_in_the_document(path: str) -> None:
    name = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    check = validator(name.rpartition("/")[2])
    for body in BASES[path]:
        check.validate(body)


def test_every_path_of_the_model_side_is_in_the_document() -> None:
    assert {*BY_PATH, *COUNTS} == set(POSTS)
    SCHEMA.validate()


async def test_the_document_is_served_to_anybody() -> None:
    async with gateway(settings=config(model={"path": "nowhere", "aliases": ["gpt-x"]})) as rig:
        async with aiohttp.ClientSession() as http, http.get(f"{rig.url}/openapi.json") as response:
            served = await response.json()
        assert response.status == 200
        assert served["components"]["schemas"]["ModelName"]["enum"] == ["policy", "gpt-x"]
