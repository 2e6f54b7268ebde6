"""A vLLM server that replays recorded answers: the K most probable tokens of each position of the golden run's prompts.

The answers stand in recorded_vllm.json.xz, as the stand-in of test_server_vllm.py gave them once for the teacher of
test_golden_runs.py; a prompt that was not recorded is refused.

    python tests/recorded_vllm.py        # record them anew
"""

from __future__ import annotations

import contextlib
import json
import lzma
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forked import PLACES
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

RECORDED = Path(__file__).with_name("recorded_vllm.json.xz")


def key_of(prompt: list[int]) -> str:
    """A prompt as a key of the recorded answers."""
    return " ".join(map(str, prompt))


def replaying(answers: dict[str, object]) -> Starlette:
    """The server of recorded answers, by prompt."""

    async def models(request):
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "root": "tiny", "max_model_len": 512}]})

    async def completions(request):
        query = await request.json()
        choices = [
            {"index": index, "text": "", "prompt_logprobs": answers[key_of(prompt)], "finish_reason": "length"}
            for index, prompt in enumerate(query["prompt"])
        ]
        return JSONResponse({"id": "cmpl-1", "object": "text_completion", "choices": choices})

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])])


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of the server of the recorded answers."""
    from distill.serving.open import running

    answers = json.loads(lzma.decompress(RECORDED.read_bytes()))
    with running(replaying(answers)) as url:
        yield url


def record() -> None:
    """Record what the stand-in answers to the golden run."""
    import test_golden_runs
    from served import engine_in
    from test_server_vllm import vllm

    from distill.recipe import parse
    from distill.run import run
    from distill.serving.open import running

    answers: dict[str, object] = {}

    def recording(inner: Starlette) -> Starlette:
        async def completions(request):
            query = await request.json()
            response = await inner.routes[1].endpoint(request)
            for choice in json.loads(response.body)["choices"]:
                answers[key_of(query["prompt"][choice["index"]])] = choice["prompt_logprobs"]
            return response

        return Starlette(routes=[inner.routes[0], Route("/v1/completions", completions, methods=["POST"])])

    with tempfile.TemporaryDirectory() as folder:
        place = test_golden_runs.write_place(Path(folder))
        with test_golden_runs.alone(place), running(recording(vllm(engine_in(place)))) as url:
            text = test_golden_runs.RUNS["vLLM"].recipe.replace("{vllm}", url)
            run(parse(text, (), name="golden"), name="golden")
    RECORDED.write_bytes(lzma.compress(json.dumps(answers, sort_keys=True).encode(), preset=9))
    print(f"{len(answers)} prompts, {RECORDED.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.path[:0] = PLACES
    record()
