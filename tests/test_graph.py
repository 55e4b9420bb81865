"""The operations inside MLX's graph: compile, vmap, streams, threads, strides, large buffers."""

from __future__ import annotations

import threading

import exactspec
import mlx.core as mx
import numpy as np
import pytest
from backends import COMPILED_SOON
from exactspec import Cascade, Sampling, Typical
from strategies import LAYOUTS, lay_out

B, K, V = 6, 3, 300
SAMPLING = Sampling(temperature=0.8, top_k=100, top_p=0.95)
OTHER_RULES = ("block", "coupled", Typical(), Cascade())


def inputs(seed: int = 0) -> dict[str, mx.array]:
    """A sampled batch with a dense draft, ragged; drafts are often accepted."""
    keys = mx.random.split(mx.random.key(seed), 5)
    target = 2 * mx.random.normal((B, K + 1, V), key=keys[0])
    draft = target[:, :K] + 0.5 * mx.random.normal((B, K, V), key=keys[1])
    given = {
        "target_logits": target,
        "draft_tokens": mx.random.categorical(draft, key=keys[2]).astype(mx.int32),
        "draft_logits": draft,
        "draft_lengths": mx.array([3, 2, 1, 0, 3, 3], mx.int32),
        "keys": mx.random.split(keys[3], B),
        "token_bitmask": mx.random.randint(-(2**31), 2**31 - 1, (B, K + 1, 10), key=keys[4]),
    }
    mx.eval(given)
    return given


def inputs_of(rule, seed: int = 0) -> dict[str, mx.array]:
    """The same with the noise that a rule needs; where it is shared, drafts are the choices."""
    given = inputs(seed)
    if rule == "coupled":
        given["positions"] = mx.array([0, 7, 8, 100, 2**20, 2**31 - 1 - K], mx.int32)
        choices = [
            exactspec.sample(
                given["target_logits"][:, i],
                SAMPLING,
                rule="coupled",
                keys=given["keys"],
                positions=given["positions"] + i,
                token_bitmask=given["token_bitmask"][:, i],
            ).tokens
            for i in range(K)
        ]
        given["draft_tokens"] = mx.stack(choices, axis=1)
        given["draft_tokens"][:2, 1] = 0
    return given


def assert_same(got, wanted) -> None:
    """The same bits in every array of two results."""
    assert type(got) is type(wanted)
    for name, x, y in zip(wanted._fields, got, wanted):
        if isinstance(y, tuple):
            assert_same(x, y)
        elif isinstance(y, mx.array):
            np.testing.assert_array_equal(np.array(x), np.array(y), err_msg=name)
        else:
            assert x == y, name


# compile


@pytest.mark.quick(backend=COMPILED_SOON)
def test_compile(backend):
    options = {"sampling": SAMPLING, "logprobs": "raw", "stats": True}

    @mx.compile
    def verify(given):
        return backend.verify_draft(**given, **options)

    for seed in range(3):
        given = inputs(seed)
        assert_same(verify(given), backend.verify_draft(**given, **options))


@pytest.mark.quick(backend=COMPILED_SOON)
@pytest.mark.parametrize("rule", OTHER_RULES, ids=str)
def test_compile_rules(backend, rule):
    """Positions and keys are inputs of the compiled function; the rule is a constant of it."""
    options = {"sampling": SAMPLING, "logprobs": "raw", "stats": True, "rule": rule}
    traces, num_accepted = [], 0

    @mx.compile
    def verify(given):
        traces.append(1)
        return backend.verify_draft(**given, **options)

    for seed in range(3):
        given = inputs_of(rule, seed)
        wanted = backend.verify_draft(**given, **options)
        num_accepted += wanted.num_accepted.sum().item()
        assert_same(verify(given), wanted)
    assert len(traces) == 1 and num_accepted > 0


@pytest.mark.quick(backend=COMPILED_SOON)
def test_rules_do_not_share_a_graph(backend):
    """Compiled together, equal inputs under different rules stay apart (no node is merged)."""
    rules = ("token", "block", Typical(), Typical(0.5, 2.0), Cascade(), Cascade(0.9))
    given = inputs(4)
    del given["token_bitmask"]  # more drafts are accepted

    @mx.compile
    def verify(given):
        return [backend.verify_draft(**given, rule=rule).tokens for rule in rules]

    wanted = [backend.verify_draft(**given, rule=rule).tokens.tolist() for rule in rules]
    assert [tokens.tolist() for tokens in verify(given)] == wanted
    assert len({str(tokens) for tokens in wanted}) > 3


@pytest.mark.quick(backend=COMPILED_SOON)
def test_compiled_parameters_are_not_baked_in(backend):
    """Parameters passed as arrays may change between calls, without tracing again."""
    traces = []

    def verify(given, sampling):
        traces.append(1)
        return backend.verify_draft(**given, sampling=sampling, logprobs="filtered")

    def draw(logits, sampling, keys):
        traces.append(1)
        return backend.sample(logits, sampling, keys=keys)

    compiled_verify, compiled_draw = mx.compile(verify), mx.compile(draw)
    given = inputs()
    for temperature in (0.5, 1.0, 0.0):
        sampling = Sampling(
            temperature=mx.full((B,), temperature),
            top_k=mx.full((B,), 7, mx.int32),
            top_p=mx.full((B,), 0.9),
            min_p=mx.full((B,), 0.01),
        )
        wanted = backend.verify_draft(**given, sampling=sampling, logprobs="filtered")
        assert_same(compiled_verify(given, sampling), wanted)
        logits, keys = given["target_logits"][:, 0], mx.array(given["keys"])
        wanted = backend.sample(logits, sampling, keys=keys)
        assert_same(compiled_draw(logits, sampling, keys), wanted)
    assert len(traces) == 2


def test_compile_shapeless(backend):
    """Another batch size neither fails nor gives another result."""

    @mx.compile
    def verify(target, tokens, keys):
        return backend.verify_draft(target, tokens, keys=keys).tokens

    given = inputs()
    arguments = [given[name] for name in ("target_logits", "draft_tokens", "keys")]
    whole = verify(*arguments).tolist()
    assert verify(*(x[:4] for x in arguments)).tolist() == whole[:4]


def test_compile_with_captured_random_state(backend):
    given = inputs()
    del given["keys"]
    random_state = mx.random.state

    def verify():
        return backend.verify_draft(**given, sampling=SAMPLING).tokens

    def draws(function):
        mx.random.seed(5)
        return [function().tolist() for _ in range(3)]

    captured = mx.compile(verify, inputs=random_state, outputs=random_state)
    wanted = draws(verify)
    assert draws(captured) == wanted
    assert len({str(tokens) for tokens in wanted}) > 1


def test_draft_step_and_verification_in_one_graph(backend):
    """Draft steps, their statistics and the verification, compiled together."""

    def step(target, draft, keys):
        keys = keys.reshape(K + 1, B, 2)
        drawn = [backend.sample(draft[:, i], SAMPLING, keys=keys[i]) for i in range(K)]
        return backend.verify_draft(
            target,
            mx.stack([row.tokens for row in drawn], axis=1),
            draft_logits=draft,
            draft_stats=mx.stack([row.row_stats for row in drawn], axis=1),
            sampling=SAMPLING,
            keys=keys[K],
        )

    given = inputs()
    keys = mx.random.split(mx.random.key(3), (K + 1) * B)
    result = step(given["target_logits"], given["draft_logits"], keys)
    compiled = mx.compile(step)(given["target_logits"], given["draft_logits"], keys)
    assert not result.status.any().item() and result.num_accepted.sum().item() > 0
    assert_same(compiled, result)


# vmap


def array_fields(result) -> tuple:
    return tuple(x for x in result if isinstance(x, mx.array))


def check_vmap(function, mapped: dict[str, mx.array], shared: dict[str, mx.array]) -> None:
    """``vmap`` over the leading axis of ``mapped`` gives the same bits as a loop."""
    names = list(mapped)

    def call(*values):
        return array_fields(function(**dict(zip(names, values)), **shared))

    got = mx.vmap(call)(*mapped.values())
    size = len(next(iter(mapped.values())))
    rows = [call(*(value[i] for value in mapped.values())) for i in range(size)]
    for x, ys in zip(got, zip(*rows), strict=True):
        np.testing.assert_array_equal(np.array(x), np.stack([np.array(y) for y in ys]))


def test_vmap_over_sequences(backend):
    """Functions of one sequence, without a batch axis."""

    def verify(**given):
        return backend.verify_draft(**given, sampling=SAMPLING, logprobs="raw")

    check_vmap(verify, inputs(), {})


@pytest.mark.parametrize(
    "names",
    [
        ("target_logits",),
        ("draft_tokens",),
        ("draft_logits",),
        ("draft_lengths",),
        ("keys",),
        ("token_bitmask",),
        ("target_logits", "keys"),
        ("draft_tokens", "draft_logits"),
    ],
    ids="-".join,
)
def test_vmap_over_some_inputs(backend, names):
    given = inputs()
    mapped = {name: given[name] for name in names}
    shared = {name: value[4] for name, value in given.items() if name not in names}
    check_vmap(lambda **x: backend.verify_draft(**x, sampling=SAMPLING), mapped, shared)


@pytest.mark.parametrize("rule", OTHER_RULES, ids=str)
def test_vmap_over_sequences_by_other_rules(backend, rule):
    given = inputs_of(rule)
    check_vmap(lambda **x: backend.verify_draft(**x, sampling=SAMPLING, rule=rule), given, {})


@pytest.mark.parametrize(
    "names",
    [("positions",), ("keys",), ("target_logits",), ("draft_tokens",), ("keys", "positions")],
    ids="-".join,
)
def test_vmap_over_some_inputs_of_shared_noise(backend, names):
    """Of ``verify_draft``, and of ``sample`` where it has them."""
    given = inputs_of("coupled")
    mapped = {name: given[name] for name in names}
    shared = {name: value[4] for name, value in given.items() if name not in names}
    options = {"sampling": SAMPLING, "rule": "coupled"}
    check_vmap(lambda **x: backend.verify_draft(**x, **options), mapped, shared)
    if "draft_tokens" in names:
        return

    def draw(target_logits, keys, positions):
        return backend.sample(target_logits[0], keys=keys, positions=positions, **options)

    shared = {
        name: shared[name] for name in ("target_logits", "keys", "positions") if name in shared
    }
    check_vmap(draw, mapped, shared)


@pytest.mark.parametrize("rule", OTHER_RULES, ids=str)
def test_vmap_over_batches_by_other_rules(backend, rule):
    batches = [inputs_of(rule, seed) for seed in range(2)]
    stacked = {name: mx.stack([batch[name] for batch in batches]) for name in batches[0]}
    check_vmap(lambda **x: backend.verify_draft(**x, sampling=SAMPLING, rule=rule), stacked, {})


def test_vmap_over_batches(backend):
    """Two batches stacked: a vmapped axis on top of the batch axis."""
    batches = [inputs(seed) for seed in range(2)]
    stacked = {name: mx.stack([batch[name] for batch in batches]) for name in batches[0]}
    check_vmap(lambda **x: backend.verify_draft(**x, sampling=SAMPLING), stacked, {})


@pytest.mark.parametrize("name", ["target_logits", "draft_tokens", "keys"])
def test_vmap_over_some_inputs_of_batches(backend, name):
    """The others have the batch axis alone, and so no single stride for both axes."""
    given = inputs()
    mapped = {name: mx.stack([given[name], inputs(1)[name]])}
    del given[name]
    check_vmap(lambda **x: backend.verify_draft(**x, sampling=SAMPLING), mapped, given)


def test_vmap_over_other_axes(backend):
    given = inputs()
    moved = mx.moveaxis(given["target_logits"], 0, 2)

    def verify(target, tokens):
        return backend.verify_draft(target, tokens, uniforms=mx.full((K + 2,), 0.5)).tokens

    got = mx.vmap(verify, in_axes=(2, 0), out_axes=1)(moved, given["draft_tokens"])
    wanted = [
        verify(given["target_logits"][b], given["draft_tokens"][b]).tolist() for b in range(B)
    ]
    assert got.T.tolist() == wanted


def test_vmap_over_parameters(backend):
    given = {name: value[0] for name, value in inputs().items()}
    temperatures = mx.array([0.0, 0.5, 1.0, 3.0])
    top_ks = mx.array([0, 1, 5, 50], mx.int32)

    def verify(temperature, top_k):
        sampling = Sampling(temperature=temperature, top_k=top_k)
        return backend.verify_draft(**given, sampling=sampling)

    check_vmap(verify, {"temperature": temperatures, "top_k": top_ks}, {})


def test_vmap_over_sparse_draft(backend):
    given = inputs()
    mapped = {
        "target_logits": given["target_logits"],
        "draft_tokens": given["draft_tokens"],
        "draft_ids": mx.broadcast_to(given["draft_tokens"][..., None], (B, K, 1)),
        "draft_probs": mx.full((B, K, 1), 0.9),
        "keys": given["keys"],
    }
    check_vmap(backend.verify_draft, mapped, {})


def test_vmap_sample(backend):
    given = inputs()
    mapped = {"logits": given["target_logits"][:, 0], "keys": given["keys"]}
    check_vmap(lambda **x: backend.sample(**x, logprobs="raw"), mapped, {})
    check_vmap(
        lambda **x: backend.sample(**x, sampling=SAMPLING),
        {"logits": mapped["logits"]},
        {"keys": mapped["keys"][0]},
    )
    check_vmap(
        lambda **x: backend.sample(**x, sampling=SAMPLING),
        {"token_bitmask": given["token_bitmask"][:, 0]},
        {"logits": mapped["logits"][0], "keys": mapped["keys"][0]},
    )


BATCHES = [(3, 1), (1, 3), (1, 1), (1, 2, 3), (2, 1, 3), (2, 3, 1), (1, 1, 3), (1, 3, 1), (3, 1, 1)]


def calls_of_every_kind(backend, count: int) -> list[tuple]:
    """Functions of a batch, and their inputs for ``count`` sequences that all differ."""
    size, slots, nodes = 40, 2, 3
    keys = mx.random.split(mx.random.key(3), 6)
    rows = 2 * mx.random.normal((count, nodes + 1, size), key=keys[0])
    drafts = rows + 0.5 * mx.random.normal(rows.shape, key=keys[1])
    tokens = mx.random.categorical(drafts[:, :nodes], key=keys[2]).astype(mx.int32)
    shared = {
        "keys": mx.random.split(keys[3], count),
        "temperature": mx.random.uniform(0.5, 1.5, (count,), key=keys[4]),
        "top_k": mx.arange(count, dtype=mx.int32) + 20,
    }
    bitmask = mx.random.randint(-(2**31), 2**31 - 1, (count, nodes + 1, 2), key=keys[5])
    chain = {
        **shared,
        "target_logits": rows[:, : slots + 1],
        "draft_tokens": tokens[:, :slots],
        "token_bitmask": bitmask[:, : slots + 1],
    }
    lengths = mx.arange(count, dtype=mx.int32) % (slots + 1)
    support = mx.stack([tokens[:, :slots], (tokens[:, :slots] + 1) % size], axis=-1)
    sparse = {"draft_ids": support, "draft_probs": mx.full(support.shape, 0.5)}
    parents = mx.array([-1, -1, 0]) + mx.zeros((count, 1), mx.int32)
    tree = {"target_logits": rows, "draft_tokens": tokens, "parents": parents}
    positions = mx.arange(count, dtype=mx.int32) * 7

    def sampled(operation, **options):
        def call(temperature, top_k, **arguments):
            sampling = Sampling(temperature, top_k)
            return operation(sampling=sampling, logprobs="raw", **options, **arguments)

        return call

    verify, coupled = sampled(backend.verify_draft), {"rule": "coupled"}
    return [
        (verify, {**chain, "draft_logits": drafts[:, :slots], "draft_lengths": lengths}),
        (verify, {**chain, **sparse}),
        (sampled(backend.verify_draft, **coupled), {**chain, "positions": positions}),
        (
            sampled(backend.sample),
            # An array of its own: verifying by the array that a token was drawn with warns.
            {**shared, "keys": mx.array(shared["keys"]), "logits": rows[:, 0]}
            | {"token_bitmask": bitmask[:, 0]},
        ),
        (
            sampled(backend.sample, **coupled),
            {**shared, "logits": rows[:, 0], "positions": positions},
        ),
        (
            sampled(backend.verify_tree),
            {**shared, **tree, "draft_logits": drafts, "token_bitmask": bitmask},
        ),
    ]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_vmap_over_batches_of_every_shape(backend, batch):
    """An axis with one element may have any stride, wherever it stands."""
    count = int(np.prod(batch))
    for function, given in calls_of_every_kind(backend, count):
        names = list(given)

        def call(*values, function=function, names=names):
            return array_fields(function(**dict(zip(names, values))))

        wanted = call(*given.values())
        mapped = call
        for _ in batch[1:]:
            mapped = mx.vmap(mapped)
        got = mapped(*(x.reshape(*batch, *x.shape[1:]) for x in given.values()))
        for x, y in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(np.array(x), np.array(y).reshape(x.shape))
        if count > 1 and "draft_tokens" not in names:
            assert len(set(wanted[0].tolist())) > 1


# Streams and threads


def test_other_streams(backend):
    """Inputs made on one stream, used on another."""
    given = inputs()
    wanted = backend.verify_draft(**given, sampling=SAMPLING)
    first, second = mx.new_stream(mx.cpu), mx.new_stream(mx.cpu)
    with mx.stream(first):
        target = given["target_logits"] + 0.0
    for stream in (first, second, mx.default_stream(mx.cpu), mx.cpu):
        got = backend.verify_draft(
            **{**given, "target_logits": target}, sampling=SAMPLING, stream=stream
        )
        with mx.stream(second):
            shifted = got.tokens + 1
        assert_same(got, wanted)
        assert (shifted - 1).tolist() == wanted.tokens.tolist()
        keys = mx.array(given["keys"])
        row = backend.sample(target[:, 0], keys=keys, stream=stream)
        assert_same(row, backend.sample(target[:, 0], keys=keys))


@pytest.mark.parametrize("rule", OTHER_RULES, ids=str)
def test_other_rules_on_another_stream(backend, rule):
    given, stream = inputs_of(rule), mx.new_stream(mx.cpu)
    wanted = backend.verify_draft(**given, sampling=SAMPLING, rule=rule)
    got = backend.verify_draft(**given, sampling=SAMPLING, rule=rule, stream=stream)
    assert_same(got, wanted)
    if rule == "coupled":
        noise = {"rule": rule, "keys": given["keys"], "positions": given["positions"]}
        target = given["target_logits"][:, 0]
        assert_same(backend.sample(target, **noise, stream=stream), backend.sample(target, **noise))


def test_async_eval(backend):
    """Results in flight, their inputs gone."""
    wanted = [backend.verify_draft(**inputs(seed), sampling=SAMPLING) for seed in range(8)]
    mx.eval([result.tokens for result in wanted])
    flying = []
    for seed in range(8):
        result = backend.verify_draft(**inputs(seed), sampling=SAMPLING)
        mx.async_eval(result.tokens, result.num_accepted, result.status)
        flying.append(result)
    for got, result in zip(flying, wanted):
        assert_same(got, result)


def test_threads(backend):
    """Several Python threads at once, each with a stream of its own."""
    wanted = [backend.verify_draft(**inputs(seed), sampling=SAMPLING) for seed in range(4)]
    wanted = [[np.array(x) for x in array_fields(result)] for result in wanted]
    faults = []

    def work(seed: int) -> None:
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                for _ in range(10):
                    result = backend.verify_draft(**inputs(seed), sampling=SAMPLING)
                    for got, values in zip(array_fields(result), wanted[seed]):
                        np.testing.assert_array_equal(np.array(got), values)
        except BaseException as fault:  # carried to the main thread
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults
    assert exactspec.ops._ext is exactspec._ext  # the simulator's stand-in is gone


# Strides


@pytest.mark.quick(dtype=[mx.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_layouts(backend, layout, dtype):
    """The same bits from any view of the same values, whatever lies between them."""
    given = inputs()
    given["sampling"] = Sampling(temperature=mx.linspace(0.5, 1.5, B))
    given["target_logits"] = given["target_logits"].astype(dtype)
    given["draft_logits"] = given["draft_logits"].astype(dtype)
    given["draft_vocab"] = mx.arange(V, dtype=mx.int32)
    if layout == "broadcast":
        given = {
            name: mx.repeat(value[:1], B, axis=0)
            if isinstance(value, mx.array) and name != "draft_vocab"
            else value
            for name, value in given.items()
        }
        given["sampling"] = Sampling(temperature=mx.full((B,), 0.7))

    def view(values):
        is_float = mx.issubdtype(values.dtype, mx.floating)
        as_numpy = np.array(values.astype(mx.float32) if is_float else values)
        return lay_out(as_numpy, values.dtype, layout).view

    views = {
        name: view(value)
        for name, value in given.items()
        if isinstance(value, mx.array) and not (layout == "broadcast" and name == "draft_vocab")
    }
    views["sampling"] = Sampling(temperature=view(given["sampling"].temperature))
    wanted = backend.verify_draft(**given, logprobs="raw", stats=True)
    assert_same(backend.verify_draft(**{**given, **views}, logprobs="raw", stats=True), wanted)


def test_broadcast_target_is_read_in_place(backend):
    """A row shared by stride 0 among the slots and the batch."""
    row = mx.random.normal((V,), key=mx.random.key(1))
    target = mx.broadcast_to(row, (B, K + 1, V))
    tokens = mx.random.randint(0, V, (B, K), key=mx.random.key(2))
    keys = mx.random.split(mx.random.key(3), B)
    got = backend.verify_draft(target, tokens, draft_logits=target[:, :K], keys=keys)
    copied = mx.array(np.array(target))
    wanted = backend.verify_draft(copied, tokens, draft_logits=copied[:, :K], keys=keys)
    assert_same(got, wanted)


@pytest.fixture(scope="module")
def distant_rows() -> mx.array:
    """``[2, 8]`` bfloat16: equal logits, and 2**31 elements further on all mass on id 5."""
    buffer = mx.zeros((2**16 + 1, 2**15), mx.bfloat16)
    buffer[-1, :8] = mx.array([-40.0] * 5 + [40.0] + [-40.0] * 2)
    rows = buffer[:: 2**16, :8]
    mx.eval(rows)
    return rows


@pytest.mark.prove
def test_more_than_2_to_31_elements(backend, distant_rows):
    """Row offsets need 64 bits, along the batch, along the slots, and in the draft."""
    uniforms = mx.full((2, 2), 0.1)
    assert backend.sample(distant_rows, uniforms=uniforms).tokens.tolist() == [0, 5]
    no_draft = mx.zeros((2, 0), mx.int32)
    result = backend.verify_draft(distant_rows[:, None], no_draft, uniforms=uniforms)
    assert result.tokens.tolist() == [[0], [5]]
    result = backend.verify_draft(
        distant_rows[None],
        mx.array([[5]], mx.int32),
        draft_logits=distant_rows[None, 1:],
        uniforms=mx.full((1, 3), 0.2),
    )
    assert result.tokens.tolist() == [[1, -1]]  # 0.2 * 1 < 1/8 fails; ids but 5 share the residual
