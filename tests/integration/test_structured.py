"""Structured output through real engines and the real gateway."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import openai

from headwater.client import Client
from headwater.generation import Constraint, SamplingParams
from tests.integration.gateway import gateway, until_ready
from tests.integration.stack import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.stack import Stack

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "size": {"enum": [1, 2, 3]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Which city?"}]


async def test_constraints_over_grpc(shared_stack: Stack) -> None:
    async def answer(constraint: Constraint) -> str:
        params = SamplingParams(seed=1, max_tokens=60, constraint=constraint)
        async with Client(shared_stack.addresses["router"]) as client:
            return "".join([event.text async for event in client.generate("x", params)])

    assert set(json.loads(await answer(Constraint("json_schema", json.dumps(SCHEMA))))) == {
        "city",
        "size",
    }
    assert re.fullmatch("[a-c]{4}", await answer(Constraint("regex", "[a-c]{4}")))
    assert await answer(Constraint("choice", '["red", "green"]')) in ("red", "green")


async def test_the_gateways_json_schema(shared_stack: Stack, tmp_path: Path) -> None:
    """A model of random weights cannot but conform."""
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    router_port = int(shared_stack.addresses["router"].rpartition(":")[2])
    async with gateway(port, router_port, tmp_path) as process:
        await until_ready(f"127.0.0.1:{port}", process)
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused") as client:
            reply = await client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=100,
                seed=1,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                },
            )
            content = reply.choices[0].message.content
            assert content is not None
            assert set(json.loads(content)) == {"city", "size"}
