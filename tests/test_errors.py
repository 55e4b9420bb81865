"""Bad arguments: every one gives an error that names the operation, the argument, and what came."""

from __future__ import annotations

import re
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from exactspec import Cascade, Sampling, Typical, ops

B, K, V, S = 2, 3, 40, 4


def dense(**changes) -> dict:
    """Good arguments of ``verify_draft`` with a dense draft, then ``changes``."""
    return {
        "target_logits": mx.zeros((B, K + 1, V)),
        "draft_tokens": mx.zeros((B, K), mx.int32),
        "draft_logits": mx.zeros((B, K, V)),
        "draft_lengths": mx.full((B,), K, mx.int32),
        "draft_stats": mx.zeros((B, K, 4)),
        "uniforms": mx.zeros((B, K + 2)),
        "token_bitmask": mx.full((B, K + 1, 2), -1, mx.int32),
        **changes,
    }


def sparse(**changes) -> dict:
    return {
        "target_logits": mx.zeros((B, K + 1, V)),
        "draft_tokens": mx.zeros((B, K), mx.int32),
        "draft_ids": mx.zeros((B, K, S), mx.int32),
        "draft_probs": mx.full((B, K, S), 0.25),
        "uniforms": mx.zeros((B, K + 2)),
        **changes,
    }


def one_hot(**changes) -> dict:
    return {
        "target_logits": mx.zeros((B, K + 1, V)),
        "draft_tokens": mx.zeros((B, K), mx.int32),
        **changes,
    }


def coupled(**changes) -> dict:
    noise = {"keys": mx.zeros((B, 2), mx.uint32), "positions": mx.zeros((B,), mx.int32)}
    return one_hot(**{"rule": "coupled", **noise, **changes})


def plain(**changes) -> dict:
    """Good arguments of ``sample``, then ``changes``."""
    return {
        "logits": mx.zeros((B, V)),
        "uniforms": mx.zeros((B, 2)),
        "token_bitmask": mx.full((B, 2), -1, mx.int32),
        **changes,
    }


def plain_coupled(**changes) -> dict:
    return {
        "logits": mx.zeros((B, V)),
        "rule": "coupled",
        "keys": mx.zeros((B, 2), mx.uint32),
        "positions": mx.zeros((B,), mx.int32),
        **changes,
    }


def check_error(operation, name: str, argument: str, arguments: dict, *, came: str = "") -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        result = operation(**arguments)
        mx.eval(result.tokens)
    message = str(error.value)
    assert message.startswith(f"[{name}] "), message
    assert argument in message and came in message, message


def test_the_good_arguments_are_good(backend):
    lossy = (dense(rule=Typical()), sparse(rule=Cascade()), one_hot(rule=Typical(1, 0)))
    for arguments in (dense(), sparse(), one_hot(), coupled(), dense(rule="block"), *lossy):
        assert backend.verify_draft(**arguments).status.tolist() == [0] * B
    for arguments in (plain(), plain_coupled()):
        assert backend.sample(**arguments).status.tolist() == [0] * B


# Rank, shape, dtype, type

SHAPES = [
    (dense, "target_logits", (V,)),
    (dense, "target_logits", (1, B, K + 1, V)),
    (dense, "target_logits", (B, K, V)),
    (dense, "target_logits", (B, 0, V)),
    (dense, "target_logits", (B, K + 1, 0)),
    (dense, "draft_tokens", (B,)),
    (dense, "draft_tokens", (B, K, 1)),
    (dense, "draft_tokens", (B + 1, K)),
    (dense, "draft_tokens", (B, K + 1)),
    (dense, "draft_logits", (B, V)),
    (dense, "draft_logits", (B + 1, K, V)),
    (dense, "draft_logits", (B, K + 1, V)),
    (dense, "draft_logits", (B, K, 0)),
    (dense, "draft_lengths", (B, 1)),
    (dense, "draft_lengths", (B + 1,)),
    (dense, "draft_lengths", ()),
    (dense, "draft_stats", (B, K)),
    (dense, "draft_stats", (B, K, 3)),
    (dense, "draft_stats", (B, K + 1, 4)),
    (dense, "uniforms", (K + 2,)),
    (dense, "uniforms", (B, K + 1)),
    (dense, "uniforms", (B + 1, K + 2)),
    (dense, "token_bitmask", (B, K + 1)),
    (dense, "token_bitmask", (B, K, 2)),
    (dense, "token_bitmask", (B, K + 1, 1)),
    (dense, "token_bitmask", (B, K + 1, 3)),
    (sparse, "draft_ids", (B, K)),
    (sparse, "draft_ids", (B, K, S + 1)),
    (sparse, "draft_ids", (B + 1, K, S)),
    (sparse, "draft_probs", (B, S)),
    (sparse, "draft_probs", (B, K, S + 1)),
    (sparse, "draft_probs", (B, K + 1, S)),
    (coupled, "keys", (B, 3)),
    (coupled, "positions", ()),
    (coupled, "positions", (B, 1)),
    (coupled, "positions", (B + 1,)),
    (coupled, "positions", (B, K)),
    (plain_coupled, "positions", ()),
    (plain_coupled, "positions", (B + 1,)),
    (plain, "logits", ()),
    (plain, "logits", (1, B, V)),
    (plain, "logits", (B, 0)),
    (plain, "uniforms", (B,)),
    (plain, "uniforms", (B, 3)),
    (plain, "uniforms", (B + 1, 2)),
    (plain, "token_bitmask", (B,)),
    (plain, "token_bitmask", (B, 3)),
    (plain, "token_bitmask", (B + 1, 2)),
]

DTYPES = [
    *((dense, "target_logits", d) for d in (mx.int32, mx.uint32, mx.complex64, mx.float64)),
    *((dense, "draft_logits", d) for d in (mx.int32, mx.bool_, mx.float64)),
    *((dense, "draft_tokens", d) for d in (mx.int64, mx.int16, mx.uint8, mx.float32)),
    *((dense, "draft_lengths", d) for d in (mx.int64, mx.float32)),
    *((dense, "draft_stats", d) for d in (mx.float16, mx.bfloat16, mx.int32)),
    *((dense, "uniforms", d) for d in (mx.float16, mx.bfloat16, mx.int32)),
    *((dense, "token_bitmask", d) for d in (mx.int64, mx.bool_, mx.float32)),
    *((sparse, "draft_ids", d) for d in (mx.int64, mx.float32)),
    *((sparse, "draft_probs", d) for d in (mx.float16, mx.bfloat16, mx.int32)),
    *((coupled, "positions", d) for d in (mx.uint32, mx.int64, mx.float32)),
    *((coupled, "keys", d) for d in (mx.int32, mx.float32)),
    *((plain_coupled, "positions", d) for d in (mx.uint32, mx.int64)),
    *((plain, "logits", d) for d in (mx.int32, mx.bool_, mx.float64)),
    *((plain, "uniforms", d) for d in (mx.float16, mx.int32)),
    *((plain, "token_bitmask", d) for d in (mx.int64, mx.bool_)),
]


def operation_of(backend, arguments) -> tuple:
    if arguments in (plain, plain_coupled):
        return backend.sample, "sample"
    return backend.verify_draft, "verify_draft"


def parameter_id(value) -> str:
    return value.__name__ if callable(value) else str(value)


@pytest.mark.parametrize("arguments, argument, shape", SHAPES, ids=parameter_id)
def test_shape(backend, arguments, argument, shape):
    bad = {argument: mx.zeros(shape, arguments()[argument].dtype)}
    # Where two arguments disagree, either may be the one that is named.
    either = {"target_logits": "expected shape", "draft_ids": "draft_"}
    named = either.get(argument, argument) if len(shape) == 3 and 0 not in shape else argument
    check_error(*operation_of(backend, arguments), named, arguments(**bad))


@pytest.mark.parametrize("arguments, argument, dtype", DTYPES, ids=parameter_id)
def test_dtype(backend, arguments, argument, dtype):
    bad = {argument: mx.zeros(arguments()[argument].shape).astype(dtype, stream=mx.cpu)}
    came = str(dtype).removeprefix("mlx.core.")
    check_error(*operation_of(backend, arguments), argument, arguments(**bad), came=came)


@pytest.mark.parametrize(
    "arguments, argument",
    [
        (a, name)
        for a in (dense, sparse, coupled, plain, plain_coupled)
        for name in a()
        if name != "rule"
    ],
    ids=parameter_id,
)
@pytest.mark.parametrize("kind", ["numpy", "list", "number", "string"])
def test_not_an_array(backend, arguments, argument, kind):
    good = arguments()[argument]
    bad = {"numpy": np.array(good), "list": good.tolist(), "number": 1.0, "string": "x"}[kind]
    operation, name = operation_of(backend, arguments)
    with pytest.raises(TypeError) as error:
        operation(**arguments(**{argument: bad}))
    message = str(error.value)
    assert message.startswith(f"[{name}] ") and argument in message
    assert type(bad).__name__ in message


@pytest.mark.parametrize(
    "arguments, argument",
    [(dense, "target_logits"), (dense, "draft_tokens"), (plain, "logits")],
    ids=parameter_id,
)
def test_not_optional(backend, arguments, argument):
    check_error(*operation_of(backend, arguments), argument, arguments(**{argument: None}))


@pytest.mark.parametrize("arguments", [dense, plain], ids=parameter_id)
@pytest.mark.parametrize(
    "shape, dtype",
    [((2,), mx.uint32), ((B, 3), mx.uint32), ((B + 1, 2), mx.uint32)]
    + [((B, 2), d) for d in (mx.int32, mx.uint64, mx.float32)],
    ids=str,
)
def test_keys(backend, arguments, shape, dtype):
    given = arguments(keys=mx.zeros(shape, dtype))
    del given["uniforms"]
    check_error(*operation_of(backend, arguments), "keys", given)


@pytest.mark.parametrize(
    "shape, dtype",
    [((V, 1), mx.int32), ((V - 1,), mx.int32), ((V,), mx.int64), ((V,), mx.float32)],
    ids=str,
)
def test_draft_vocab(backend, shape, dtype):
    given = dense(draft_vocab=mx.zeros(shape, dtype))
    check_error(backend.verify_draft, "verify_draft", "draft_vocab", given)


@pytest.mark.parametrize("batch", [(), (B,)])
def test_forgotten_row_is_blamed_on_the_target(backend, batch):
    """As many rows as drafts: the usual mistake."""
    target, tokens = mx.zeros((*batch, K, V)), mx.zeros((*batch, K), mx.int32)
    right = [*batch, K + 1, V]
    message = re.escape(f"target_logits: expected shape {right} with draft_tokens {[*batch, K]} (")
    got = re.escape(f"got {[*batch, K, V]}, a row too few")
    for drafted in ({}, {"draft_logits": target}):
        with pytest.raises(ValueError, match=rf"^\[verify_draft\] {message}.*bonus row.*{got}$"):
            backend.verify_draft(target, tokens, **drafted)
    with pytest.raises(ValueError, match=rf"^\[verify_tree\] {message}.*context's row.*{got}$"):
        backend.verify_tree(target, tokens, tokens - 1)


# Combinations


@pytest.mark.parametrize(
    "argument, given",
    [
        ("draft_probs", one_hot(draft_ids=mx.zeros((B, K, S), mx.int32))),
        ("draft_ids", one_hot(draft_probs=mx.zeros((B, K, S)))),
        ("draft_logits", sparse(draft_logits=mx.zeros((B, K, V)))),
        ("draft_vocab", sparse(draft_vocab=mx.arange(V, dtype=mx.int32))),
        ("draft_vocab", one_hot(draft_vocab=mx.arange(V, dtype=mx.int32))),
        ("draft_stats", sparse(draft_stats=mx.zeros((B, K, 4)))),
        ("draft_stats", one_hot(draft_stats=mx.zeros((B, K, 4)))),
        ("draft_sampling", sparse(draft_sampling=Sampling())),
        ("draft_sampling", one_hot(draft_sampling=Sampling())),
        ("uniforms", dense(keys=mx.zeros((B, 2), mx.uint32))),
        ("keys", dense(keys=mx.zeros((B, 2), mx.uint32))),
        ("uniforms", coupled(uniforms=mx.zeros((B, K + 2)))),
        ("uniforms", coupled(uniforms=mx.zeros((B, K + 2)), keys=None)),
        ("keys", coupled(keys=None)),
        ("positions", coupled(positions=None)),
        *(
            ("positions", dense(positions=mx.zeros((B,), mx.int32), rule=rule))
            for rule in ("token", "block", Typical(), Cascade())
        ),
        ("rule", one_hot(rule=Cascade())),
        ("logprobs", dense(logprobs="log")),
        ("logprobs", dense(logprobs=True)),
    ],
)
def test_verify_draft_combination(backend, argument, given):
    check_error(backend.verify_draft, "verify_draft", argument, given)


@pytest.mark.parametrize(
    "argument, given",
    [
        ("uniforms", plain(keys=mx.zeros((B, 2), mx.uint32))),
        ("rule", plain(rule="block")),
        ("rule", plain(rule="token")),
        ("rule", plain(rule=Typical())),
        ("positions", plain(positions=mx.zeros((B,), mx.int32))),
        ("uniforms", plain_coupled(uniforms=mx.zeros((B, 2)))),
        ("keys", plain_coupled(keys=None)),
        ("positions", plain_coupled(positions=None)),
        ("logprobs", plain(logprobs="log")),
    ],
)
def test_sample_combination(backend, argument, given):
    check_error(backend.sample, "sample", argument, given)


NO_RULES = [
    *("typical", "Typical", "cascade", "Cascade", "lossy", "tokens", "TOKEN", "no such rule", ""),
    *(None, True, 0, 3, ("typical", 0.09, 0.3), (3, 0.09, 0.3), Typical, Cascade, b"token"),
]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-39])
def test_cascade_needs_no_distribution_at_temperature_0(backend, temperature):
    """It is not read there; what an array holds is not known when the graph is built."""
    given = one_hot(rule=Cascade(), sampling=Sampling(temperature))
    given["target_logits"] = mx.random.normal((B, K + 1, V), key=mx.random.key(0))
    given["draft_tokens"] = mx.argmax(given["target_logits"], axis=-1)[:, :K].astype(mx.int32)
    result, token = (backend.verify_draft(**{**given, "rule": r}) for r in (Cascade(), "token"))
    assert result.num_accepted.tolist() == [K] * B
    assert result.tokens.tolist() == token.tokens.tolist()
    for unknown in (2.0**-126, mx.zeros((B,))):
        check_error(
            backend.verify_draft,
            "verify_draft",
            "rule",
            {**given, "sampling": Sampling(unknown)},
            came="temperature",
        )


def test_extension_refuses_uniforms_with_shared_noise():
    """Not only the package in front of it."""
    one, absent = mx.zeros((1,), mx.int32), [None] * 6
    parameters = (1.0, 0.0, 1.0, 0.0, 0)
    coupled, noise = ops.pack_rule("coupled"), (mx.zeros((1, 3)), None, one, None)
    with pytest.raises(ValueError, match=r"^\[verify_draft\] uniforms: expected None with rule="):
        ops._ext.verify_draft(
            mx.zeros((1, 2, 4)),
            one[None],
            *absent,
            parameters,
            parameters,
            coupled,
            *noise,
            0,
            False,
            mx.cpu,
        )
    pair = (mx.zeros((1, 2)), *noise[1:])
    with pytest.raises(ValueError, match=r"^\[sample\] uniforms: expected None with rule="):
        ops._ext.sample(mx.zeros((1, 4)), parameters, coupled[0], *pair, 0, mx.cpu)


@pytest.mark.parametrize("rule", NO_RULES, ids=str)
def test_no_such_rule(backend, rule):
    """The message names the rules; a lossy one is reached by its class alone."""
    for operation, name, given, known in (
        (backend.verify_draft, "verify_draft", dense(), "'token', 'block', 'coupled'"),
        (backend.sample, "sample", plain(), "'independent', 'coupled'"),
    ):
        with pytest.raises(ValueError) as error:
            operation(**{**given, "rule": rule})
        message = str(error.value)
        assert message.startswith(f"[{name}] rule: expected one of {known}"), message
        assert message.endswith(f", got {rule!r}"), message


@pytest.mark.parametrize(
    "rule, field",
    [
        *((Typical(epsilon=x), "epsilon") for x in (-0.1, 1.1, np.nan, np.inf, -np.inf)),
        *((Typical(delta=x), "delta") for x in (-1e-9, np.nan, np.inf)),
        *((Cascade(x), "alpha") for x in (-1.1, 1.1, np.nan, -np.inf)),
    ],
    ids=str,
)
def test_rule_out_of_range(backend, rule, field):
    with pytest.raises(ValueError) as error:
        backend.verify_draft(**dense(rule=rule))
    message = str(error.value)
    assert message.startswith(f"[verify_draft] rule.{field}: expected "), message
    assert message.endswith(f", got {getattr(rule, field)!r}"), message


@pytest.mark.parametrize("value", [True, None, "0.1", mx.array(0.1), [0.1]], ids=str)
def test_rule_of_a_wrong_type(backend, value):
    for rule in (Typical(epsilon=value), Typical(delta=value), Cascade(value)):
        with pytest.raises(
            TypeError, match=r"^\[verify_draft\] rule\.\w+: expected a number, got "
        ):
            backend.verify_draft(**dense(rule=rule))


def test_keys_serve_254_slots(backend):
    many = 255
    given = {
        "target_logits": mx.zeros((1, many + 1, 2)),
        "draft_tokens": mx.zeros((1, many), mx.int32),
    }
    keys = {"keys": mx.zeros((1, 2), mx.uint32)}
    shared = {**keys, "rule": "coupled", "positions": mx.zeros((1,), mx.int32)}
    for noise in (keys, {}, {**keys, "rule": "block"}, shared):
        with pytest.raises(ValueError, match=r"^\[verify_draft\] .*254.*255"):
            backend.verify_draft(**given, **noise)
    result = backend.verify_draft(**given, uniforms=mx.zeros((1, many + 2)))
    assert result.num_accepted.item() == many


# Parameters

BAD_NUMBERS = [
    *(("temperature", value) for value in (-1.0, -1e-9, float("nan"), float("inf"), 1e300)),
    *(("top_k", value) for value in (2**31, -(2**31) - 1, np.int64(2**40))),
    *((name, v) for name in ("top_p", "min_p") for v in (-0.1, 1.1, float("nan"), float("inf"))),
]
BAD_TYPES = [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in ("1", None, [1.0])),
    *(("top_k", value) for value in (1.5, "1", None)),
    *((name, np.ones(B, np.float32)) for name in ("temperature", "top_k", "top_p", "min_p")),
]


@pytest.mark.parametrize("side", ["sampling", "draft_sampling"])
@pytest.mark.parametrize("field, value", BAD_NUMBERS)
def test_bad_number(backend, side, field, value):
    bad = Sampling(**{field: value})
    with pytest.raises(ValueError) as error:
        backend.verify_draft(**dense(**{side: bad}))
    assert str(error.value).startswith(f"[verify_draft] {side}.{field}: expected ")
    assert str(value) in str(error.value)
    if side == "sampling":
        with pytest.raises(ValueError, match=rf"^\[sample\] sampling.{field}: expected .*, got "):
            backend.sample(**plain(sampling=bad))


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_number_that_no_float_holds(backend, field, digits):
    bad = Sampling(**{field: 10**digits})
    with pytest.raises(ValueError, match=rf"^\[sample\] sampling.{field}: expected .* bits$"):
        backend.sample(**plain(sampling=bad))


@pytest.mark.parametrize("number", [2**128 - 2**103 - 1, Fraction(10**5000), -Fraction(10**5000)])
def test_numbers_count_as_the_float_they_become(backend, number):
    message = (
        r"^\[sample\] sampling.temperature: expected .*(128 bits|a Fraction of thousands of d.*)$"
    )
    with pytest.raises(ValueError, match=message):
        backend.sample(**plain(sampling=Sampling(number)))
    with pytest.raises(ValueError, match=r"rule.delta: expected .* got an? [iF].*(bits|digits)$"):
        backend.verify_draft(**dense(rule=Typical(delta=number)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "number", [np.float16(0.5), np.float32(0.5), np.float64(0.5), Fraction(1, 2)]
)
def test_other_types_of_numbers(backend, number):
    result = backend.sample(**plain(sampling=Sampling(number, 3, number, number)))
    expected = backend.sample(**plain(sampling=Sampling(0.5, 3, 0.5, 0.5)))
    assert result.tokens.tolist() == expected.tokens.tolist()


def test_largest_numbers(backend):
    largest = Sampling(temperature=3.4028235e38, top_k=2**31 - 1)
    assert backend.sample(**plain(sampling=largest)).status.tolist() == [0] * B


@pytest.mark.parametrize("side", ["sampling", "draft_sampling"])
@pytest.mark.parametrize("field, value", BAD_TYPES, ids=str)
def test_bad_type(backend, side, field, value):
    bad = Sampling(**{field: value})
    with pytest.raises(TypeError) as error:
        backend.verify_draft(**dense(**{side: bad}))
    assert str(error.value).startswith(f"[verify_draft] {side}.{field}: expected ")
    if side == "sampling":
        with pytest.raises(TypeError, match=rf"^\[sample\] sampling.{field}: expected .*, got "):
            backend.sample(**plain(sampling=bad))


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p"])
def test_bad_array(backend, field):
    """Wrong shape or dtype of a parameter array."""
    for array in (
        mx.ones((B + 1,)),
        mx.ones((B, 1)),
        mx.ones((B,), mx.complex64),
        mx.ones((B,), mx.bool_),
    ):
        given = {"sampling": Sampling(**{field: array})}
        check_error(backend.verify_draft, "verify_draft", f"sampling.{field}", dense(**given))
        check_error(backend.sample, "sample", f"sampling.{field}", plain(**given))


@pytest.mark.parametrize("order", ["first", "", None, 0])
def test_bad_order(backend, order):
    given = {"sampling": Sampling(order=order)}
    check_error(backend.verify_draft, "verify_draft", "sampling.order", dense(**given))
    check_error(backend.sample, "sample", "sampling.order", plain(**given))


@pytest.mark.parametrize("sampling", [None, 1.0, (1.0, 0, 1.0, 0.0, "temperature_first"), {}])
def test_not_a_sampling(backend, sampling):
    for operation, name, given in (
        (backend.verify_draft, "verify_draft", dense(sampling=sampling)),
        (backend.sample, "sample", plain(sampling=sampling)),
    ):
        with pytest.raises(TypeError, match=rf"^\[{name}\] sampling: expected .*Sampling, got "):
            operation(**given)


# What the operations cannot do


def test_stream(backend):
    for operation, name, given in (
        (backend.verify_draft, "verify_draft", dense),
        (backend.sample, "sample", plain),
    ):
        with pytest.raises(
            (TypeError, ValueError), match=rf"^\[{name}\] stream: expected .*, got "
        ):
            operation(**given(stream="cpu"))


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a GPU")
def test_gpu_stream(backend):
    for operation, given in ((backend.verify_draft, dense), (backend.sample, plain)):
        with pytest.raises(ValueError):
            operation(**given(stream=mx.gpu))


def test_no_gradient(fused_backend):
    target = mx.random.normal((B, K + 1, V), key=mx.random.key(0))

    def loss(logits):
        arguments = dense(target_logits=logits, logprobs="filtered")
        return fused_backend.verify_draft(**arguments).logprobs.sum()

    with pytest.raises(ValueError, match="derivative") as error:
        mx.eval(mx.grad(loss)(target))
    assert "verify_draft" in str(error.value).lower() or "VerifyDraft" in str(error.value)
    with pytest.raises(ValueError, match="derivative") as error:
        mx.eval(
            mx.grad(
                lambda x: fused_backend.sample(**plain(logits=x, logprobs="raw")).logprobs.sum()
            )(target[:, 0])
        )
    assert "sample" in str(error.value).lower()


def test_no_forward_gradient(fused_backend):
    target = mx.random.normal((B, K + 1, V), key=mx.random.key(0))
    with pytest.raises(ValueError, match="derivative"):
        mx.eval(
            mx.jvp(
                lambda x: (
                    fused_backend.verify_draft(**dense(target_logits=x, logprobs="raw")).logprobs
                ),
                [target],
                [target],
            )
        )


def test_no_export(fused_backend, tmp_path):
    def verify(target, tokens, uniforms):
        return fused_backend.verify_draft(target, tokens, uniforms=uniforms).tokens

    with pytest.raises((RuntimeError, ValueError), match="export|serializ") as error:
        mx.export_function(
            str(tmp_path / "verify.mlxfn"),
            verify,
            mx.zeros((B, K + 1, V)),
            mx.zeros((B, K), mx.int32),
            mx.zeros((B, K + 2)),
        )
    assert "VerifyDraft" in str(error.value) or "verify_draft" in str(error.value)
