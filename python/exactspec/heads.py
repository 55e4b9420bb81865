"""Draft heads: light networks that predict further tokens from a target's own hidden states."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx import nn
from mlx_lm.models import llama, mimo
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

DEFAULT_HEAD = Path(__file__).with_name("data") / "smollm2-135m-head.safetensors"

# What a head's file says of its layers.
_CONFIG = {
    "hidden_size": int,
    "num_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "intermediate_size": int,
    "rms_norm_eps": float,
    "rope_theta": float,
    "rope_traditional": bool,
    "vocab_size": int,
}


class Head(Protocol):
    """What ``exactspec.drafters.MTPDrafter`` asks of a head.

    Attributes:
        hidden_size: d, of the target's hidden states and of the head's outputs.
        draft_vocab: int32 ``[Vd]``, the ids that ``logits`` is for; None for all ids of the target.
    """

    hidden_size: int
    draft_vocab: mx.array | None

    def make_cache(self) -> list[Any]:
        """A cache for the head's entries of one text, a trimmable one for each layer."""

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: list[Any]) -> mx.array:
        """Append n entries and return their outputs.

        Args:
            tokens: int32 ``[n]``, of each entry the token behind ``hidden``.
            hidden: ``[n, d]``, the target's hidden states or, for drafted tokens, the head's
                outputs.
            cache: the entries before.

        Returns:
            ``[n, d]``: the outputs, which predict the token after ``tokens``.
        """

    def logits(self, outputs: mx.array, ids: mx.array | None = None) -> mx.array:
        """Logits ``[n, Vd]`` of outputs ``[n, d]``; or ``[n, m]`` for ``ids``, int32 ``[m]``, which
        is only asked of a head with a ``draft_vocab``."""


class DraftHead(nn.Module):
    """A trained head: a projection and llama layers between the target's own embedding matrices.

    Entry j takes token j + 1 and hidden state j. RMS norms of the token's embedding and of the
    hidden state are joined and projected to one vector, as in DeepSeek-V3's multi-token prediction
    (arXiv:2412.19437, equation 21), llama layers and another norm follow, and the target's
    embedding matrix, which must be its output matrix too, turns the result into logits.

    Args:
        args: of the layers, with ``num_hidden_layers`` of the head.
        embedding: the target's, used as it is.
        draft_vocab: int32 ``[Vd]``, the ids to draft.
    """

    def __init__(self, args: llama.ModelArgs, embedding: nn.Embedding, draft_vocab: mx.array):
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.hidden_size = size
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.projection = nn.Linear(2 * size, size, bias=False)
        self.layers = [llama.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(size, eps)
        # No child of this module: what is done to all of its layers leaves the target's alone.
        object.__setattr__(self, "_embedding", embedding)
        # Names with an underscore are no parameters.
        self._vocab_size = args.vocab_size
        self._draft_vocab = draft_vocab
        self._output = embedding(draft_vocab)
        mx.eval(self._draft_vocab, self._output)

    @property
    def draft_vocab(self) -> mx.array:
        return self._draft_vocab

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: list[Any]) -> mx.array:
        parts = self.embedding_norm(self._embed(tokens)), self.hidden_norm(hidden)
        x = self.projection(mx.concatenate(parts, axis=-1))[None]
        mask = create_attention_mask(x, cache[0])
        for layer, layer_cache in zip(self.layers, cache):
            x = layer(x, mask, layer_cache)
        return self.norm(x)[0]

    def logits(self, outputs: mx.array, ids: mx.array | None = None) -> mx.array:
        return outputs @ (self._output if ids is None else self._embed(ids)).T

    def _embed(self, ids: mx.array) -> mx.array:
        # A tokenizer may have ids that the target has not; none may index past its matrix.
        return self._embedding(mx.minimum(ids, self._vocab_size - 1))

    @classmethod
    def load(cls, path: str | Path, model: Any) -> DraftHead:
        """Load a head and attach it to its target.

        Args:
            path: a safetensors file with the head's parameters, ``draft_vocab``, and metadata:
                ``"target"``, the target's name, and ``"config"``, a JSON object.
            model: the target, an mlx-lm model whose embedding matrix is its output matrix.

        Raises:
            ValueError: the file is no head, or ``model`` has an embedding matrix of another shape
                than the head's target, or an output matrix beside it.
            FileNotFoundError: there is no such file.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"[DraftHead.load] path: expected a file, got {path}")
        with _refusing("[DraftHead.load] path", path):
            weights, metadata = mx.load(str(path), return_metadata=True)
            draft_vocab, target = weights.pop("draft_vocab"), metadata["target"]
            config = _checked_config(json.loads(metadata["config"]))
        expected = (config["vocab_size"], config["hidden_size"])
        embedding = getattr(getattr(model, "model", None), "embed_tokens", None)
        got = None
        if isinstance(embedding, (nn.Embedding, nn.QuantizedEmbedding)):
            got = embedding.weight.shape[0], embedding(mx.zeros((1,), mx.int32)).shape[-1]
        if got != expected or hasattr(model, "lm_head"):
            kind = f"{type(model).__module__}.{type(model).__qualname__}"
            raise ValueError(
                f"[DraftHead.load] model: expected {target}, whose embedding matrix "
                f"{list(expected)} is its output matrix, got {kind} "
                + ("with an output matrix" if got == expected else f"with {got and list(got)}")
            )
        with _refusing("[DraftHead.load] path", path):
            check_draft_vocab(draft_vocab, got[0])
            layers = {name: config[name] for name in _CONFIG if name != "num_layers"}
            args = llama.ModelArgs("llama", num_hidden_layers=config["num_layers"], **layers)
            head = cls(args, embedding, draft_vocab)
            head.load_weights([(k, v.astype(head._output.dtype)) for k, v in weights.items()])
            mx.eval(head.parameters())
        return head.eval()


class MiMoHead(mimo.TransformerBlock):
    """The head that MiMo's checkpoints carry: their multi-token prediction layer.

    As ``DraftHead``, with a layer of the target's kind (Xiaomi, arXiv:2505.07608). It
    drafts from the whole vocabulary, by the target's output matrix.

    Args:
        model: the target, an mlx-lm model of type ``mimo``.
    """

    # Its names in a checkpoint, which mlx-lm leaves out of the model.
    PREFIX = "model.mtp_layers.0."

    draft_vocab = None

    def __init__(self, model: mimo.Model):
        super().__init__(model.args)
        size, eps = model.args.hidden_size, model.args.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(size, eps)
        self.hidden_layernorm = nn.RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.final_layernorm = nn.RMSNorm(size, eps)
        # No child of this module: what is done to all of its layers leaves the target's alone.
        object.__setattr__(self, "_model", model)

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: list[Any]) -> mx.array:
        embedding = self._model.model.embed_tokens(tokens)
        parts = self.hidden_layernorm(hidden), self.token_layernorm(embedding)
        x = self.input_proj(mx.concatenate(parts, axis=-1))[None]
        x = super().__call__(x, create_attention_mask(x, cache[0]), cache[0])
        return self.final_layernorm(x)[0]

    def logits(self, outputs: mx.array, ids: mx.array | None = None) -> mx.array:
        if self._model.args.tie_word_embeddings:
            return self._model.model.embed_tokens.as_linear(outputs)
        return self._model.lm_head(outputs)

    @classmethod
    def load(cls, folder: str | Path, model: Any) -> MiMoHead:
        """Load the head of a released checkpoint.

        Args:
            folder: with the checkpoint's safetensors files.
            model: the target, as ``mlx_lm.load`` returns it for that folder.

        Raises:
            ValueError: ``model`` is no MiMo, or the folder has no such head.
        """
        if not isinstance(model, mimo.Model):
            raise ValueError(
                f"[MiMoHead.load] model: expected a MiMo, got {type(model).__module__}."
                f"{type(model).__qualname__}"
            )
        with _refusing("[MiMoHead.load] folder", folder):
            weights = {
                name.removeprefix(cls.PREFIX): value
                for file in sorted(Path(folder).glob("*.safetensors"))
                for name, value in mx.load(str(file)).items()
                if name.startswith(cls.PREFIX)
            }
        if not weights:
            raise ValueError(
                f"[MiMoHead.load] folder: expected safetensors files with {cls.PREFIX}*, got "
                f"{folder} without"
            )
        with _refusing("[MiMoHead.load] folder", folder):
            head = cls(model)
            head.load_weights(list(weights.items()))
            mx.eval(head.parameters())
        return head.eval()


def load_default_head(model: Any) -> DraftHead:
    """Load the head that comes with this package, for ``DEFAULT_MODEL``.

    Args:
        model: what ``exactspec.models.load_default_model`` returns.

    Raises:
        ValueError: ``model`` has an embedding matrix of another shape, or an output matrix
            beside it.
    """
    return DraftHead.load(DEFAULT_HEAD, model)


def check_default_head(config: dict[str, Any]) -> None:
    """Raise ``ValueError`` if a model cannot draft with the head that comes with this package.

    Args:
        config: the model's ``config.json``: known before its weights are.
    """
    metadata = mx.load(str(DEFAULT_HEAD), return_metadata=True)[1]
    expected = json.loads(metadata["config"])
    for name in ("hidden_size", "vocab_size"):
        if config.get(name) != expected[name]:
            raise ValueError(
                f"the draft head: expected {metadata['target']}, of {name} {expected[name]}, got a "
                f"{config.get('model_type')} of {config.get(name)}"
            )


def check_draft_vocab(ids: Any, vocab_size: int = 2**24) -> None:
    """Raise ``ValueError`` unless ``ids`` are int32 ``[Vd]`` in ``[0, vocab_size)``.

    A negative id would end a draft where it was drawn, and bias the text.
    """
    expected = f"expected a draft_vocab of int32 ids [Vd] in [0, {vocab_size}), got "
    if not isinstance(ids, mx.array):
        raise ValueError(expected + type(ids).__name__)
    if ids.ndim != 1 or ids.dtype != mx.int32:
        dtype = str(ids.dtype).removeprefix("mlx.core.")
        raise ValueError(f"{expected}{dtype} {list(ids.shape)}")
    if ids.size and not 0 <= mx.min(ids).item() <= mx.max(ids).item() < vocab_size:
        raise ValueError(f"{expected}ids from {mx.min(ids).item()} to {mx.max(ids).item()}")


def _checked_config(config: Any) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise ValueError(f"expected a config that is an object, got {config!r}")
    for name, kind in _CONFIG.items():
        value = config.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = isinstance(value, kind) if kind is not float else number
        if not fits or (kind is not bool and (value is True or not value > 0)):
            raise ValueError(f"expected {name} in its config, {kind.__name__}, got {value!r}")
    return config


@contextlib.contextmanager
def _refusing(argument: str, got: Any) -> Iterator[None]:
    """Say which file is damaged, whatever that led to."""
    try:
        yield
    except Exception as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{argument}: expected a head, got {got} ({reason})") from error
