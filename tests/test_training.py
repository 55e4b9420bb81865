"""The training code: unrolled steps, loss, draws, checkpoints; what evaluation asks the target."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch: pip install '.[training]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

import torch.distributed as dist  # noqa: E402
import train  # noqa: E402
from evaluation import target_after_chains  # noqa: E402
from head import CHUNK, DraftLoss, Head, save_head, start_from  # noqa: E402
from sampling import Text, draw, save_shard  # noqa: E402
from target import Target  # noqa: E402

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


@pytest.mark.parametrize("tv_weight", [0.0, 2.0])
def test_loss_and_its_gradient(tv_weight):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, vocab_matrix = normal(CHUNK + 9, 24), normal(50, 24) / 5
    log_sum = (hidden @ vocab_matrix.T).logsumexp(-1) + 0.1  # some mass is on other ids
    out = normal(CHUNK + 9, 24).requires_grad_()
    loss, sums = DraftLoss.apply(out, hidden, log_sum, vocab_matrix, tv_weight)
    (gradient,) = torch.autograd.grad(loss, out)

    target = (hidden @ vocab_matrix.T - log_sum[:, None]).exp()
    draft = torch.log_softmax(out @ vocab_matrix.T, -1)
    cross_entropy = -(target * draft).sum()
    acceptance = torch.minimum(target, draft.exp()).sum()
    wanted = cross_entropy + tv_weight * (len(out) - acceptance)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(
        sums, torch.stack((cross_entropy, acceptance, target.sum())).detach()
    )
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, out)[0], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_target_after_chains_is_that_of_the_text_with_each_chain():
    target = Target(torch.float32)
    ids = torch.tensor([1, 504, 2365, 282, 260, 905, 314, 253])
    last, chains = torch.tensor([3, 5]), torch.tensor([[17, 90, 4], [905, 2, 77]])
    after = target_after_chains(target, ids, last, chains)
    for text, (end, chain) in enumerate(zip(last, chains)):
        whole = torch.cat((ids[: end + 1], chain[:-1]))
        hidden = target.forward(whole, torch.arange(len(whole)))
        torch.testing.assert_close(after[text], hidden[end:], rtol=1e-4, atol=1e-4)


def save_texts(folder):
    """30 texts of random ids, with hidden states that tell the next id."""
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(300, 24, generator=generator)
    texts = []
    for length in torch.randint(12, 20, (30,), generator=generator).tolist():
        ids = torch.randint(0, 300, (length,), generator=generator).int()
        hidden = embedding[ids.roll(-1).long()].bfloat16()
        log_sum = (hidden @ embedding.bfloat16().T).float().logsumexp(-1)
        texts.append(Text(ids, hidden, log_sum, 3, 1.0))
    save_shard(folder / "shard-00000.safetensors", texts)
    return SimpleNamespace(
        args=SimpleNamespace(vocab_size=300),
        embedding=embedding.bfloat16(),
        logits=lambda hidden: hidden @ embedding.bfloat16().T,
    )


def test_stopped_training_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "DRAFT_VOCAB", 100)
    monkeypatch.setattr(train, "BATCH", 60)
    monkeypatch.setattr(train, "CHECKPOINT_UPDATES", 7)
    target = save_texts(tmp_path)
    texts = train.Texts(tmp_path)
    meeting = (tmp_path / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)

    class Stopped(Exception):
        pass

    def run(checkpoint, stop_after=None, tokens=700, vocab=None, before=()):
        def export(state):
            if stop_after is not None and state.updates >= stop_after:
                raise Stopped

        torch.manual_seed(1)
        head = Head(ARGS, torch.ones(24))
        args = (head, target, texts, 2, tokens, 1, checkpoint, None, export, vocab, before)
        return head, train.train(*args)

    try:
        straight, state = run(tmp_path / "straight.pt")
        assert state.trained >= 700 > state.trained - 60 and state.epoch >= 1
        assert state.log[-1]["acceptance_1"] > 0
        for stop_after in (7, 14):
            with pytest.raises(Stopped):
                run(tmp_path / "stopped.pt", stop_after)
        resumed, again = run(tmp_path / "stopped.pt")
        assert again.updates == state.updates and again.trained == state.trained
        for wanted, got in zip(straight.parameters(), resumed.parameters()):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        with pytest.raises(ValueError, match=r"checkpoint: expected one of .* got .*stopped\.pt"):
            run(tmp_path / "stopped.pt", tokens=701)
        # Trained weights keep their vocabulary, and go on at a lower rate.
        vocab, before = torch.arange(50), [{"data": {}, "training": {"tokens": 9}}]
        continued, state = run(tmp_path / "continued.pt", vocab=vocab, before=before)
        assert torch.equal(state.vocab, vocab) and state.before == before
        saved = torch.load(tmp_path / "continued.pt", weights_only=True)
        rates = [maker["param_groups"][0]["initial_lr"] for maker in saved["optimizers"]]
        assert rates == [0.5 * train.MATRIX_RATE, 0.5 * train.NORM_RATE]
        with pytest.raises(ValueError, match="after 0 before, got .* after 9 before"):
            run(tmp_path / "continued.pt", vocab=vocab)
    finally:
        dist.destroy_process_group()


def test_training_starts_from_a_saved_head(tmp_path, monkeypatch):
    torch.manual_seed(7)
    saved, path = Head(ARGS, torch.ones(24)), tmp_path / "head.safetensors"
    vocab, target = torch.tensor([3, 5, 8]), SimpleNamespace(args=SimpleNamespace(**vars(ARGS)))
    target.args.vocab_size = 300
    stages = [{"data": {"tokens": n}, "training": {"tokens": 2 * n}} for n in (10, 20)]
    about = stages[1]["training"] | {"log": [{"trained": 1}]}
    about = {"data": stages[1]["data"], "training": about, "before": stages[:1]}
    save_head(path, saved, vocab, target, about)
    head = Head(ARGS, torch.zeros(24))
    got_vocab, before = start_from(path, head)
    assert torch.equal(got_vocab, vocab) and before == stages
    for wanted, got in zip(saved.parameters(), head.parameters()):
        assert torch.equal(got, wanted.half().float())
    save_head(tmp_path / "unfinished.safetensors", saved, vocab, target, {})
    with pytest.raises(ValueError, match="path: expected a finished head, got .*unfinished"):
        start_from(tmp_path / "unfinished.safetensors", head)
    monkeypatch.setattr("head.target_name", lambda: "another model")
    with pytest.raises(ValueError, match="path: expected a head of another model, got one of Smol"):
        start_from(path, head)
