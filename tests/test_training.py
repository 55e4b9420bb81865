"""The training code: its unrolled steps, its loss and its draws."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install '.[training]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

from head import Head  # noqa: E402
from sampling import draw  # noqa: E402

ARGS = SimpleNamespace(
    hidden_size=24,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=40,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


@torch.inference_mode()
@pytest.mark.parametrize("layers", [1, 2])
def test_unrolled_steps_are_those_of_a_draft(layers):
    torch.manual_seed(0)
    head = Head(ARGS, torch.ones(24), layers)
    embeddings, hidden = torch.randn(2, 1, 9, 24)
    memory, inputs, unrolled = head.new_memory(), hidden, []
    for _ in range(3):
        out = head(embeddings, inputs, memory)
        unrolled.append(out)
        inputs = torch.cat((inputs[:, :1], out[:, :-1]), 1)
    # One draft after entry 4, each of its entries a plain forward of all so far.
    last, inputs = 4, hidden.clone()
    for step in range(3):
        end = last + step + 1
        out = head(embeddings[:, :end], inputs[:, :end], head.new_memory())
        torch.testing.assert_close(out[:, -1], unrolled[step][:, end - 1])
        inputs[:, end] = out[:, -1]


def test_draws_follow_the_distribution():
    logits = torch.randn(1, 1024, generator=torch.Generator().manual_seed(1)) * 2
    count = 40_000
    rows = logits.expand(count, -1)
    drawn = draw(rows, torch.full((count,), 0.8), torch.Generator().manual_seed(2))
    wanted = torch.softmax(logits[0] / 0.8, -1)
    found = torch.bincount(drawn, minlength=1024) / count
    # The mean of total variation is about sqrt(2 / (pi n)) * sum sqrt(p (1 - p)) / 2.
    expected = (2 / (math.pi * count)) ** 0.5 * (wanted * (1 - wanted)).sqrt().sum() / 2
    assert (found - wanted).abs().sum() / 2 < 1.15 * expected


def test_temperature_0_takes_the_largest():
    logits = torch.randn(50, 1024)
    drawn = draw(logits, torch.zeros(50), torch.Generator())
    assert torch.equal(drawn, logits.argmax(-1))
