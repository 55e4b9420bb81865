"""The decode loop on SmolLM2-135M-Instruct, from prompt to text."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from exactspec import Sampling
from exactspec.drafters import Adaptive, DraftModel, DraftTree, PromptLookup
from exactspec.generate import generate
from exactspec.models import load_default_model
from toy_models import NEAR_TIE, first_difference_gap

EXAMPLE = files("exactspec").joinpath("data/prompt.txt").read_text(encoding="utf-8")
PROMPTS = {"copy": EXAMPLE, "story": "Write a short story about a lighthouse keeper."}


@pytest.fixture(scope="module")
def default_model():
    # Not skipped where the model is missing: the error says how to install it.
    return load_default_model()


def encode(tokenizer, prompt):
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


@pytest.mark.quick(name=["copy"], max_tokens=[20])
@pytest.mark.parametrize("name", list(PROMPTS))
@pytest.mark.parametrize("max_tokens", [20, 40])
def test_greedy_text_is_that_of_plain_decoding(default_model, figure, name, max_tokens):
    model, tokenizer = default_model
    prompt = encode(tokenizer, PROMPTS[name])
    options = {"sampling": Sampling(temperature=0), "max_tokens": max_tokens}
    plain = generate(model, tokenizer, prompt, **options)
    # The model drafting for itself is right nearly always, so that whole drafts are accepted.
    drafters = [
        PromptLookup(),
        DraftModel(model, tokenizer, 2),
        PromptLookup(num_branches=3),
        DraftTree(model, tokenizer, (2, 1)),
    ]
    for drafter in drafters:
        result = generate(model, tokenizer, prompt, drafter=drafter, **options)
        kind = type(drafter).__name__ + (" tree" if drafter is drafters[2] else "")
        figure(f"{kind} tokens per cycle", result.statistics.tokens_per_cycle)
        gap = first_difference_gap(model, prompt, plain.tokens, result.tokens)
        if gap is None:
            assert result.text == plain.text
        else:
            figure(f"{kind} gap of the two best logits at the first difference", gap)
            assert gap < NEAR_TIE
        if isinstance(drafter, (DraftModel, DraftTree)):
            assert result.statistics.acceptance_rate > 0.9
        elif name == "copy":
            assert result.statistics.tokens_per_cycle > 2


@pytest.mark.prove
@pytest.mark.parametrize("name", list(PROMPTS))
def test_coupled_text_does_not_depend_on_the_drafter(default_model, figure, name):
    """The same key gives the same text, bit for bit, plain or with whatever drafter."""
    model, tokenizer = default_model
    prompt = encode(tokenizer, PROMPTS[name])
    seed, temperature = 11, 0.7
    options = {
        "sampling": Sampling(temperature, top_p=0.95),
        "rule": "coupled",
        "seed": seed,
        "max_tokens": 40,
        "stop_tokens": (),
    }
    plain = generate(model, tokenizer, prompt, **options)
    drafters = [
        *(PromptLookup(count, min_ngram=1) for count in (1, 4, 9)),
        Adaptive(PromptLookup(6)),
        *(DraftModel(model, tokenizer, count) for count in (1, 3)),
        DraftModel(model, tokenizer, 2, sampling=Sampling(temperature=0)),
    ]
    differences = 0
    for drafter in drafters:
        result = generate(model, tokenizer, prompt, drafter=drafter, **options)
        gap = first_difference_gap(
            *(model, prompt, plain.tokens, result.tokens),
            temperature=temperature,
            coupled_seed=seed,
        )
        if gap is not None:
            differences += 1
            figure("gap of the two best scores at the first difference", gap)
            assert gap < NEAR_TIE
        if isinstance(drafter, DraftModel) and drafter.sampling is None:
            # The same model by the same noise: every draft is the target's choice.
            assert result.statistics.acceptance_rate > 0.9
    figure(f"texts of {len(drafters)} that part from plain decoding", differences)


def test_sampled_text_is_as_likely_as_the_model_says(default_model, figure):
    model, tokenizer = default_model
    prompt = encode(tokenizer, EXAMPLE)
    result = generate(
        model,
        tokenizer,
        prompt,
        drafter=PromptLookup(min_ngram=1),
        sampling=Sampling(temperature=0.7),
        max_tokens=60,
        stop_tokens=(),
        seed=0,
        logprobs="filtered",
    )
    assert set(result.sources) == {"draft", "residual", "bonus"}
    # Given the text before it, a token's log-probability is minus the entropy on average.
    logits = model(mx.array([prompt + result.tokens[:-1]]))[0, len(prompt) - 1 :] / 0.7
    logprobs = np.array(logits - mx.logsumexp(logits, axis=1, keepdims=True), np.float64)
    chosen = logprobs[np.arange(60), result.tokens]
    np.testing.assert_allclose(result.logprobs, chosen, atol=1e-3)
    means = (np.exp(logprobs) * logprobs).sum(1)
    variances = (np.exp(logprobs) * logprobs**2).sum(1) - means**2
    deviation = (chosen - means).sum() / np.sqrt(variances.sum())
    figure("standard deviations from the expected log-probability", deviation)
    assert abs(deviation) < 4


def test_examples_of_the_documentation_run(capsys):
    page = Path(__file__).parents[1].joinpath("docs/decoding.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 5
    names = {}
    for example in examples:
        exec(compile(example, "docs/decoding.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"(stop|length), \d\.\d\d tokens per cycle", printed[-3])
    assert printed[-2:] == ["True", "1.0"]
