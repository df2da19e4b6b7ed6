"""The single-process runner: what it promises beyond the engine's arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.blocks import Tokens
from shared.engines.local import LocalRunner
from shared.engines.transformers import TransformersEngine
from shared.errors import ContextLengthExceeded, DoesNotFit
from shared.messages import Output, Sampling

B = 16
Prompts = Callable[..., Tokens]


def how(**changes: Any) -> Sampling:
    return Sampling(**{"max_tokens": 8, "seed": 3, "temperature": 0.8, **changes})


def tokens(outputs: list[Output]) -> list[int]:
    return [output.token for output in outputs]


def test_sampled_text_is_the_same_alone_and_in_company(llama: TransformersEngine, prompts: Prompts) -> None:
    requests = [(prompts(length), how(seed=length, top_p=0.9)) for length in (3, 20, 40, 33)]
    with LocalRunner(llama, slots=64, chunk=B) as runner:
        together = runner.generate_many(requests)
        alone = [runner.generate(*request) for request in requests]
    assert together == alone
    assert len({tuple(tokens(outputs)) for outputs in alone}) == 4


def test_choices_differ_and_come_in_order(llama: TransformersEngine, prompts: Prompts) -> None:
    with LocalRunner(llama, slots=64) as runner:
        outputs = runner.generate(prompts(20), how(choices=3))
    assert [(o.choice, o.index) for o in outputs] == [(c, i) for c in range(3) for i in range(8)]
    assert len({tuple(o.token for o in outputs if o.choice == c) for c in range(3)}) == 3


def test_a_resumed_request_continues_as_if_never_interrupted(llama: TransformersEngine, prompts: Prompts) -> None:
    """Migration: outputs so far become part of the prompt, positions go on counting."""
    from shared.engines.base import Draw, Work

    sampling = how(max_tokens=8, frequency_penalty=0.5, repetition_penalty=1.2)
    prompt = prompts(21)
    with LocalRunner(llama, slots=8) as runner:
        whole = tokens(runner.generate(prompt, sampling))
        delivered = np.array(whole[:5], dtype=np.uint32)
        resumed = np.concatenate([prompt, delivered])
        [drawn] = llama.step([Work(resumed, 0, range(3), Draw(sampling, 5, 0, prompt, delivered))])
    assert drawn is not None
    assert drawn.token == whole[5]


def test_stop_and_length(llama: TransformersEngine, prompts: Prompts) -> None:
    with LocalRunner(llama, slots=8) as runner:
        free = runner.generate(prompts(9), how(temperature=0.0))
        stopped = runner.generate(prompts(9), how(temperature=0.0, stop_ids=[free[2].token]))
        at_once = runner.generate(prompts(9), how(temperature=0.0, stop_ids=[free[0].token]))
        one = runner.generate(prompts(9), how(temperature=0.0, max_tokens=1))
        held = runner.generate(prompts(9), how(temperature=0.0, stop_ids=[free[0].token], min_tokens=2))
    assert [o.finish for o in free] == [""] * 7 + ["length"]
    assert tokens(stopped) == tokens(free)[: len(stopped)] and stopped[-1].finish == "stop"
    assert [(o.token, o.finish) for o in at_once] == [(free[0].token, "stop")]
    assert [(o.token, o.finish) for o in one] == [(free[0].token, "length")]
    assert len(held) >= 2 and held[0].token != free[0].token


def test_what_cannot_fit_is_refused_before_anything_runs(llama: TransformersEngine, prompts: Prompts) -> None:
    with LocalRunner(llama, slots=2) as runner:
        with pytest.raises(DoesNotFit):
            runner.generate(prompts(2 * B), how(max_tokens=2))
        assert len(runner.generate(prompts(2 * B), how(max_tokens=1))) == 1  # the last output needs no KV
        with pytest.raises(ContextLengthExceeded):
            runner.generate(prompts(4090), how())


def test_more_requests_than_slots_take_turns(llama: TransformersEngine, prompts: Prompts) -> None:
    requests = [(prompts(B, seed), how(max_tokens=B)) for seed in range(7)]
    with LocalRunner(llama, slots=4) as small:
        outputs = small.generate_many(requests)
    with LocalRunner(llama, slots=64) as large:
        assert outputs == large.generate_many(requests)


def test_processes_generate_the_same_with_threads_that_wait_passively(
    llama: TransformersEngine, tiny: Callable[..., Path], prompts: Prompts
) -> None:
    code = (
        "import os, sys, json\n"
        "del os.environ['OMP_WAIT_POLICY']\n"
        "from shared.engines.transformers import TransformersEngine\nfrom shared.engines.local import LocalRunner\n"
        "from shared.messages import Sampling\n"
        "engine = TransformersEngine(sys.argv[1], block_size=16)\n"
        "outputs = LocalRunner(engine, slots=8).generate(json.loads(sys.argv[2]),\n"
        "    Sampling(max_tokens=8, seed=3, temperature=0.8))\n"
        "print(json.dumps([os.environ['OMP_WAIT_POLICY'], [output.token for output in outputs]]))\n"
    )
    prompt = prompts(30)
    command = [sys.executable, "-c", code, str(tiny("llama")), json.dumps(prompt.tolist())]
    elsewhere = json.loads(subprocess.check_output(command, env={**os.environ, "PYTHONHASHSEED": "5"}))
    with LocalRunner(llama, slots=8) as runner:
        assert elsewhere == ["passive", tokens(runner.generate(prompt, how()))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_are_those_of_the_plain_model(
    llama: TransformersEngine, model: Callable[..., Any], prompts: Prompts, temperature: float
) -> None:
    """Of the first token too, which is drawn where the prompt ends, and whatever settings bend the draw."""
    import torch

    prompt = prompts(2 * B + 5)
    bent = how(logprobs=4, temperature=temperature, presence_penalty=1.5, repetition_penalty=1.2, top_k=9)
    with LocalRunner(llama, slots=8, chunk=B) as runner:
        outputs = runner.generate(prompt, bent)
    ids = torch.tensor([[*prompt.tolist(), *tokens(outputs)]])
    with torch.no_grad():
        logits = model("llama")(ids).logits[0, len(prompt) - 1 : -1]
    rows = torch.log_softmax(logits.double(), -1).numpy()
    for row, output in zip(rows, outputs, strict=True):
        assert output.logprob == pytest.approx(row[output.token], abs=2e-4)
        assert [one.token for one in output.top] == np.argsort(-row, kind="stable")[:4].tolist()
        np.testing.assert_allclose([one.logprob for one in output.top], np.sort(row)[::-1][:4], atol=2e-4)
