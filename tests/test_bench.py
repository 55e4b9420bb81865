"""``exactspec bench``: every peer is verified, a wrong one is refused, and results are complete."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.dom.minidom
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec

import mlx.core as mx
import numpy as np
import pytest
from exactspec import Sampling, cli
from exactspec.bench import operation, plan, report
from exactspec.bench.operation import SETTINGS, Case, Wrong, check_law, check_tokens, measure
from exactspec.bench.peers import OURS, Absent, NumpyRule, Peer, make_peers
from test_cli import save_model
from toy_models import tiny_head, tiny_llama, toy_tokenizer
from typer.testing import CliRunner

SMALL = (2, 4, 5000)  # more than one block of the draw
OPTIONAL = {"torch": 2, "flashspec_asm_kernel": 1, "mtplx": 1}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    # PyTorch's further threads spin between calls.
    operation.use_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), chat=True)


def invoke(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.quick(dtype=["float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_peers_agree_and_are_timed(setting, dtype):
    row = measure(Case(SMALL, setting, dtype, rounds=3))
    assert list(row["peers"])[0] == OURS and row["peers"][OURS]["ratio"] == 1
    assert row["num_accepted"] == 2
    everything = {*row["peers"], *row["absent"]}
    assert everything == set(make_peers(*SETTINGS[setting]))
    for peer in row["peers"].values():
        low, high = peer["quartiles_ms"]
        assert 0 < low <= high and peer["median_ms"] > 0


def test_peers_that_are_not_installed_are_listed(monkeypatch):
    monkeypatch.setattr("exactspec.bench.peers.find_spec", lambda name: None)
    peers = make_peers(Sampling(0.6), "dense")
    absent = {name: peer.reason for name, peer in peers.items() if isinstance(peer, Absent)}
    assert len(absent) == sum(OPTIONAL.values())
    assert all(reason.startswith("not installed: pip install ") for reason in absent.values())


def test_installed_peers_are_measured():
    peers = make_peers(Sampling(0.6), "dense")
    expected = sum(count for module, count in OPTIONAL.items() if find_spec(module))
    absent = [peer for peer in peers.values() if isinstance(peer, Absent)]
    assert len(absent) == sum(OPTIONAL.values()) - expected


def with_peer(name, peer):
    def make(sampling, kind):
        return {OURS: make_peers(sampling, kind)[OURS], name: peer(sampling, kind)}

    return make


class Residual(NumpyRule):
    """The rule with another residual: the target's own distribution."""

    def _sequence(self, target, draft, tokens, uniforms):
        accepted, last = super()._sequence(target, draft, tokens, uniforms)
        if accepted < len(tokens):
            _, last = super()._sequence(target[accepted:][:1], None, tokens[:0], uniforms)
        return accepted, last


class Coin(NumpyRule):
    """The rule with a coin that accepts too rarely."""

    def _sequence(self, target, draft, tokens, uniforms):
        uniforms = np.concatenate([np.sqrt(uniforms[:-2]), uniforms[-2:]])
        return super()._sequence(target, draft, tokens, uniforms)


def wrong_peer(rule, same_tokens):
    def peer(sampling, kind):
        wrong = rule(sampling)
        return Peer(wrong.prepare, wrong.run, same_tokens)

    return with_peer("wrong", peer)


# The coins of a case leave no doubt, so only the law tells a wrong one.
@pytest.mark.parametrize("setting", ["temperature", "top_k and top_p"])
@pytest.mark.parametrize("rule, same_tokens", [(Residual, True), (Residual, False), (Coin, False)])
def test_a_wrong_peer_is_refused(rule, same_tokens, setting):
    with pytest.raises(Wrong, match="wrong"):
        measure(Case(SMALL, setting, rounds=1), wrong_peer(rule, same_tokens))


@pytest.mark.parametrize("same_tokens", [True, False])
def test_the_right_rule_is_not_refused(same_tokens):
    row = measure(Case(SMALL, "temperature", rounds=1), wrong_peer(NumpyRule, same_tokens))
    assert row["peers"]["wrong"]["verified"] == ("same tokens" if same_tokens else "same law")


def test_a_wrong_number_of_accepted_tokens_is_refused():
    ours = np.array([[3, 4, -1]]), np.array([1])
    check_tokens("peer", ours, ours, {}, True)
    check_tokens("peer", ours, (np.array([[3, 9, -1]]), np.array([1])), {}, False)
    with pytest.raises(Wrong, match=r"accepts \[2\] tokens, not \[1\]"):
        check_tokens("peer", ours, (ours[0], np.array([2])), {}, True)
    with pytest.raises(Wrong, match="emits"):
        check_tokens("peer", ours, (np.array([[3, 9, -1]]), np.array([1])), {}, True)


def test_a_wrong_residual_is_refused():
    def peer(sampling, kind):
        rule = NumpyRule(sampling)
        return Peer(rule.prepare, lambda x: (np.ones(SMALL[2]) / SMALL[2], None), part="residual")

    with pytest.raises(Wrong, match="residual"):
        measure(Case(SMALL, "temperature", rounds=1), with_peer("wrong", peer))


@pytest.mark.parametrize("kind", ["dense", "one-hot"])
@pytest.mark.parametrize("sampling", [Sampling(0.6), Sampling(0.6, top_k=4, top_p=0.8)])
def test_law_of_verify_draft_passes(sampling, kind):
    check_law(OURS, make_peers(sampling, kind)[OURS], sampling, kind)


def test_work_counts_rows_up_to_the_rejection():
    V = 1000
    assert operation.work(Case((1, 4, V), "temperature")) == {"exps": 8 * V, "bytes": 24 * V}
    assert operation.work(Case((1, 4, V), "temperature, stats")) == {
        "exps": 5 * V,
        "bytes": 16 * V,
    }
    one_hot = operation.work(Case((2, 8, V), "temperature, one-hot", "bfloat16"))
    assert one_hot == {"exps": 10 * V, "bytes": 20 * V}


def test_share_of_the_limit():
    limit = {"threads": 1, "exps_per_second": 1e9, "bytes_per_second": 1e9, "call_ms": 0.1}
    row = {"cold": False, "exps": 10**6, "bytes": 4 * 10**6, "peers": {OURS: {"median_ms": 2.0}}}
    operation.add_shares(row, limit)
    assert row["limit_ms"] == pytest.approx(1) and row["share_of_limit"] == pytest.approx(0.5)
    row["cold"] = True
    operation.add_shares(row, limit)
    assert row["limit_ms"] == pytest.approx(4)


@pytest.mark.prove
def test_json_of_both_levels_and_plots(folder, tmp_path):
    code = (
        "import sys; from exactspec.bench import plan; plan.SWEEPS[:] = [(1, 2, 64), (2, 2, 64)];"
        "from exactspec.cli import app; app(sys.argv[1:])"
    )
    arguments = [
        *("bench", "--quick", "--size", "1,2,64", "--rounds", "2", "--threads", "1"),
        *("--model", folder),
        *("--draft-model", folder, "--max-tokens", "8", "--json"),
        *("--plots", tmp_path / "plots"),
    ]
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert {"command", "device", "cpu", "system", "python", "versions"} <= set(result)
    [limit] = result["operation"]["limits"]
    assert limit["exps_per_second"] > 0 and limit["bytes_per_second"] > 0
    sizes = [tuple(row["size"]) for row in result["operation"]["results"]]
    assert sizes == [(1, 2, 64), (1, 2, 64), (2, 2, 64)]
    for row in result["operation"]["results"]:
        assert 0 < row["share_of_limit"] and row["threads"] == limit["threads"]
    loop = result["loop"]
    peers = [row["peer"] for row in loop["results"]]
    assert peers == [
        *("plain", "plain, mlx-lm", "prompt lookup"),
        *("draft model", "draft model, mlx-lm"),
    ]
    assert all(row["same_greedy_text"] for row in loop["results"])
    assert all(row["tokens_per_second"] > 0 for row in loop["results"])
    for row in loop["cycle"]:
        assert all(ms >= 0 for ms in row["ms"].values()) and 0 < row["outside_forwards"] < 1
    plots = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert plots == [f"bench_{n}.svg" for n in ("cycle", "limit", "time")]
    for path in (tmp_path / "plots").iterdir():
        xml.dom.minidom.parse(str(path))

    for load, warned in ((0.1, False), (3.0, True)):
        lines = [str(item) for item in report.tables({**result, "load": load})]
        assert any(line.startswith("limit, ") for line in lines)
        assert any("the machine was busy" in line for line in lines) == warned


@pytest.fixture
def acceptance(tmp_path):
    """A result of bench_rules.py, one of its lengths within noise."""
    rows = [
        {
            **{"rule": rule, "drafter": "copy", "temperature": t, "mean_accepted_length": 3 - t},
            "interval": [2.5 - t, 3.5 - t] if t else None,
            "within_noise": t == 1 if rule == "block" else None,
        }
        for rule in ("token", "block")
        for t in (0.0, 1.0)
    ]
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rows": rows}))
    return path


def test_acceptance_is_drawn_alone(acceptance, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "run", None)  # nothing is measured
    done = invoke("--acceptance", acceptance, "--plots", tmp_path / "plots")
    [path] = (tmp_path / "plots").iterdir()
    assert path.name == "bench_acceptance.svg" and done.stderr == f"wrote {path}\n"
    drawn = path.read_text()
    xml.dom.minidom.parseString(drawn)
    assert "block" in drawn and "not told from token" in drawn
    # The one mark that is within noise is hollow, in the colour of its rule.
    assert drawn.count("fill: #ffffff; stroke: #ff7f0e") == 1
    assert "fill: #ffffff; stroke: #1f77b4" not in drawn


@pytest.mark.parametrize("arguments", [("--acceptance", "{acceptance}"), ("operation", "--quick")])
def test_plots_without_matplotlib_name_what_installs_it(arguments, acceptance, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = [x.format(acceptance=acceptance) for x in arguments]
    done = invoke(*arguments, "--plots", acceptance.parent / "plots", code=1)
    assert done.stdout == ""
    assert done.stderr == (
        "error: --plots: expected matplotlib, which is not installed: "
        "pip install 'exactspec[bench]'\n"
    )


class InterruptedPool:
    """Runs what it is given at once; the third time, someone presses Ctrl-C."""

    error = KeyboardInterrupt

    def __init__(self, *arguments, **options):
        self.count = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def submit(self, function, *arguments):
        self.count += 1
        if self.count == 3:
            raise self.error
        future = Future()
        future.set_result(function(*arguments))
        return future


def test_interrupted_results_are_shown(folder, monkeypatch):
    monkeypatch.setattr(operation, "ProcessPoolExecutor", InterruptedPool)
    arguments = ("--size", "1,2,64", "--setting", "temperature", "--rounds", "1", "--threads", "1")
    done = invoke("operation", *arguments, "--json", code=130)
    result = json.loads(done.stdout)["operation"]
    assert len(result["results"]) == len(result["limits"]) == 1
    assert result["stopped"] == "interrupted"
    assert result["results"][0]["share_of_limit"] > 0
    assert "interrupted: " in done.stderr
    # The loop is not begun then.
    options = ("--model", folder, "--draft-model", folder, "--max-tokens", "2", "--json")
    assert "loop" not in json.loads(invoke(*arguments, *options, code=130).stdout)

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("exactspec.bench.loop.take_apart", interrupt)
    result = json.loads(invoke("loop", "--quick", *options, code=130).stdout)["loop"]
    assert len(result["results"]) == 5 and result["cycle"] == [] and result["stopped"]
    assert "plain, mlx-lm" in invoke("loop", "--quick", *options[:-1], code=130).stdout


@pytest.mark.parametrize(
    "error", [Wrong("a peer emits nonsense"), BrokenProcessPool("a process was killed")]
)
def test_what_was_measured_before_an_error_is_kept(monkeypatch, error):
    monkeypatch.setattr(operation, "ProcessPoolExecutor", InterruptedPool)
    monkeypatch.setattr(InterruptedPool, "error", error)
    arguments = ("--size", "1,2,64", "--setting", "temperature", "--rounds", "1", "--threads", "1")
    done = invoke("operation", *arguments, "--json", code=1)
    result = json.loads(done.stdout)["operation"]
    assert len(result["results"]) == 1 and result["stopped"] == str(error)
    assert f"{error}: this is what was measured before" in done.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--size", "1,4"], "--size: expected B,K,V with B >= 1, K from 1 to 254, V >= 64 and at "),
        *(
            (["--size", size], "--size: expected B,K,V")
            for size in ("1,0,99", "1,2,63", "1,1,3000000000", "99999999999999999999,1,64")
        ),
        (["--setting", "x"], "--setting: expected one of temperature; "),
        (["--dtype", "int8"], "--dtype: expected one of float32; bfloat16; float16, got 'int8'"),
        (["--threads", "0"], "--threads: expected 1 to "),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--max-tokens", "0"], "--max-tokens: expected at least 1, got 0"),
        (["--num-draft-tokens", "0"], "--num-draft-tokens: expected at least 1, got 0"),
        (["--acceptance", "x.json"], "--acceptance: expected --plots with it and nothing else"),
        (
            ["loop", "--acceptance", "x.json", "--plots", "{folder}"],
            "--acceptance: expected --plots with it and nothing else, got options of a measurement",
        ),
        (["loop", "--model", "./none"], "none"),
        (["loop", "--size", "1,2,64"], "--size: expected with the operation only, got it without"),
        (
            ["operation", "--num-draft-tokens", "3"],
            "--num-draft-tokens: expected with the loop only, got it without",
        ),
        (["operation", "--plots", __file__], "[Errno 17] File exists"),
        (
            ["--plots", "{folder}", "--acceptance", "{folder}/wrong.json"],
            "--acceptance: expected the result of bench_rules.py --json, got ",
        ),
        (["operation", "--model", "x"], "--model: expected with the loop only, got it without"),
    ],
)
def test_errors_name_the_option(arguments, message, tmp_path):
    (tmp_path / "wrong.json").write_text('{"foo": 1}')
    result = invoke(*(argument.format(folder=tmp_path) for argument in arguments), code=1)
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert result.stdout == ""


def test_quick_measures_less():
    def cases(**changes):
        options = plan.Options(*([True, False] + [None] * 7), 4, None, False, False)
        return plan.plan(options._replace(**changes))

    assert len(cases(quick=True)) == 2 < len(cases()) < len(cases(sweep=True))
    assert len(set(cases(sweep=True))) == len(cases(sweep=True))
    assert {case.cold for case in cases()} == {False, True}
    if mx.default_device() == mx.Device(mx.cpu):
        assert cases(threads=[1])[0].threads == 1


def test_the_loops_peers_of_a_model_with_a_head():
    from exactspec.bench import loop

    target = tiny_llama()
    models = loop.Models(target, target, tiny_head(target, [1, 2, 5]), toy_tokenizer(), {})
    peers = loop.make_peers(models, 4)
    # The head alone, and what the command does by default.
    assert list(peers)[-2:] == ["draft head", "prompt lookup, else draft head"]
    texts = [peer([5, 7, 1, 4, 5, 7, 1], 0.0, 12, 0).tokens for peer in peers.values()]
    assert texts == texts[:1] * len(peers)
