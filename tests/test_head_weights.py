"""The weights of the default model's draft head, as the package ships them."""

import json
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from exactspec.models import DEFAULT_MODEL

PATH = files("exactspec") / "data" / "smollm2-135m-head.safetensors"
SIZE, MLP_SIZE, KV_SIZE, VOCAB = 576, 1536, 192, 49152
LAYER = {
    "input_layernorm": (SIZE,),
    "self_attn.q_proj": (SIZE, SIZE),
    "self_attn.k_proj": (KV_SIZE, SIZE),
    "self_attn.v_proj": (KV_SIZE, SIZE),
    "self_attn.o_proj": (SIZE, SIZE),
    "post_attention_layernorm": (SIZE,),
    "mlp.gate_proj": (MLP_SIZE, SIZE),
    "mlp.up_proj": (MLP_SIZE, SIZE),
    "mlp.down_proj": (SIZE, MLP_SIZE),
}
SHAPES = {
    "embedding_norm.weight": (SIZE,),
    "hidden_norm.weight": (SIZE,),
    "projection.weight": (SIZE, 2 * SIZE),
    "norm.weight": (SIZE,),
} | {f"layers.0.{name}.weight": shape for name, shape in LAYER.items()}


@pytest.fixture(scope="module")
def head():
    return mx.load(str(PATH), return_metadata=True)


def test_size():
    assert PATH.stat().st_size <= 10_000_000


def test_metadata(head):
    _, metadata = head
    assert metadata["target"] == DEFAULT_MODEL.name
    config = json.loads(metadata["config"])
    assert config.pop("rms_norm_eps") == pytest.approx(1e-5)
    assert config == {
        "hidden_size": SIZE,
        "num_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": MLP_SIZE,
        "rope_theta": 100000.0,
        "rope_traditional": True,
        "vocab_size": VOCAB,
    }


def test_tensors(head):
    tensors, _ = head
    shapes = {name: x.shape for name, x in tensors.items() if name != "draft_vocab"}
    assert shapes == SHAPES
    for name in shapes:
        assert tensors[name].dtype == mx.float16, name
        values = np.array(tensors[name].astype(mx.float32))
        assert np.isfinite(values).all() and values.std() > 0, name


def test_draft_vocab(head):
    ids = head[0]["draft_vocab"]
    assert ids.dtype == mx.int32 and ids.shape == (8192,)
    ids = np.array(ids)
    assert (np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < VOCAB


def test_card(tmp_path, monkeypatch):
    """It is what the weights' own metadata gives."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "training")
    from card import write_card

    weights = tmp_path / "head.safetensors"
    weights.write_bytes(PATH.read_bytes())
    write_card(weights)
    assert PATH.with_suffix(".md").read_text() == weights.with_suffix(".md").read_text()
