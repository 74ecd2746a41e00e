"""`POST /v1/embeddings`: the mean of the residual stream after the last layer, over the tokens of a text."""

import asyncio
import base64
import struct
from typing import Any

from mambakit.serving.completions import read_prompts, texts_or_ids
from mambakit.serving.errors import overloaded
from mambakit.serving.schema import Schema, not_built, optional, record, text
from mambakit.serving.service import Service, embed_steps


def make_schema(vocab_size: int) -> Schema:
    return record(
        {
            "model": optional(text()),
            "input": texts_or_ids(vocab_size),
            "encoding_format": {"enum": ["float", "base64", None]},
            "dimensions": not_built(),
            "user": optional(text()),
        },
        "input",
    )


EXAMPLE = {"input": "some text"}


async def embed(service: Service, prompts: list[list[int]]) -> list[list[float]]:
    return [await service.worker.work(embed_steps(service.model, ids)) for ids in prompts]


async def handle(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    service.check_model(body)
    prompts = await read_prompts(service, body["input"])
    service.admit(1)
    try:
        vectors: list[Any] = await asyncio.wait_for(embed(service, prompts), service.limits.seconds)
    except asyncio.TimeoutError as error:
        raise overloaded("the texts took too long", status=503, seconds=5) from error
    if body.get("encoding_format") == "base64":
        vectors = [base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors]
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
    count = sum(map(len, prompts))
    return {
        "object": "list",
        "data": data,
        "model": service.name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
