"""A program with a tool: the policy asks for a number that it cannot know, and repeats it.

The policy writes one character a turn. After `?` it is shown the number; any other character is its
answer. A guess is right once in four.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from keel.types import ProgramInput

ASKED = 0.2
"""Reward for asking and then answering with a digit, before the policy has seen that it helps."""


def numbers(*, seed: int = 0) -> list[dict[str, Any]]:
    """Names from 00000 to 33333 and the number of each, from 0 to 3, which follows no rule."""
    draw = random.Random(seed)
    names = map("".join, itertools.product("0123", repeat=5))
    return [{"prompt": name, "number": str(draw.randrange(4))} for name in names]


async def run(given: ProgramInput) -> dict[str, float]:
    """One conversation; returns its reward, and whether the answer was right."""
    http = DefaultAsyncHttpxClient(verify=False)  # no certificates are loaded for plain HTTP
    async with AsyncOpenAI(
        base_url=given.base_url, api_key=given.api_key, http_client=http
    ) as client:

        async def turn() -> str:
            answer = await client.chat.completions.create(
                model=given.model, messages=messages, max_tokens=1
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            return answer.choices[0].message.content or ""

        messages: list[Any] = given.messages
        said = await turn()
        asked = said == "?"
        if asked:
            messages.append({"role": "user", "content": f">{given.columns['number']}"})
            said = await turn()
    right = float(said == given.columns["number"])
    return {"reward": right + ASKED * (asked and said.isdigit()), "right": right}
