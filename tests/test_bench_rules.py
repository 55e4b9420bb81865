"""The benchmark of the rules: what it measures, its intervals, its record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from scipy import stats
from test_cli import save_model

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_rules  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"), chat=True)


def run(capsys, *arguments):
    bench_rules.main([*map(str, arguments)])
    captured = capsys.readouterr()
    return captured.out, captured.err


def measured(capsys, *arguments):
    out, _ = run(capsys, *arguments, "--json")
    return json.loads(out)


def test_any_number_of_contexts_is_measured(folder, capsys):
    rules = ("--rules", "token", "block", "--drafters", "4-bit", "--temperatures", 0.7)
    for count in (1, 2, 5):
        result = measured(capsys, "--model", folder, "--contexts", count, "--drafts", 1, *rules)
        assert [(row["rule"], row["contexts"]) for row in result["rows"]] == [
            ("token", count),
            ("block", count),
        ]
        token, block = result["rows"]
        assert (token["interval"] is None) == (count == 1)
        assert token["within_noise"] is None and "more_than_token" in block
        if count > 1:
            low, high = token["interval"]
            assert low <= token["mean_accepted_length"] <= high


def test_filters_choose_and_the_seed_repeats(folder, capsys):
    options = ["--model", folder, "--contexts", 2, "--drafts", 2, "--num-draft-tokens", 3]
    options += ["--rules", "token", "coupled", "--drafters", "4-bit", "3-bit-tree"]
    options += ["--temperatures", 0.5, 1]
    first = measured(capsys, *options, "--seed", 3)
    cells = {(row["drafter"], row["rule"], row["temperature"]) for row in first["rows"]}
    names = {("4-bit copy", "token"), ("4-bit copy", "coupled"), ("3-bit copy, tree", "token")}
    assert cells == {(*name, temperature) for name in names for temperature in (0.5, 1.0)}
    assert first["options"]["seed"] == 3
    assert measured(capsys, *options, "--seed", 3)["rows"] == first["rows"]
    assert measured(capsys, *options, "--seed", 4)["rows"] != first["rows"]
    out, _ = run(capsys, *options)
    assert "4-bit copy" in out and "T = 0.5" in out and "±" in out and "seed 0" in out


def test_the_seed_is_of_the_noise_too(folder, capsys, monkeypatch):
    monkeypatch.setattr(bench_rules, "make_contexts", lambda *_: [[5, 6, 7], [5, 6, 8]])
    options = ["--model", folder, "--contexts", 2, "--rules", "token", "--drafters", "4-bit"]
    rows = [
        measured(capsys, *options, "--temperatures", 1, "--seed", seed)["rows"]
        for seed in (3, 3, 4)
    ]
    assert rows[0] == rows[1] != rows[2]


def test_coupled_drafts_are_judged_by_their_own_noise(folder, capsys, monkeypatch):
    """A draft model that is the target then drafts what the target chooses."""
    monkeypatch.setattr(bench_rules, "rounded", lambda model, bits: model)
    options = ("--rules", "match", "coupled", "--drafters", "4-bit", "--temperatures", 1)
    result = measured(capsys, "--model", folder, "--contexts", 3, *options)
    lengths = {row["rule"]: row["mean_accepted_length"] for row in result["rows"]}
    assert lengths["coupled"] == 4 and lengths["match (mlx-lm)"] < 3


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 14, 29])
def test_quantiles_are_students(freedom):
    expected = stats.t.ppf(0.975, freedom)
    assert bench_rules.student_quantile(0.95, freedom) == pytest.approx(expected, rel=1e-9)


def test_what_cannot_be_told_from_token_is_marked():
    token = {number: length for number, length in enumerate([1.0, 2.0, 3.0])}
    lengths = {
        ("token", "4-bit", 1.0): token,
        ("match", "4-bit", 1.0): {n: length for n, length in token.items()},
        ("block", "4-bit", 1.0): {n: length + 0.1 * (-1) ** n for n, length in token.items()},
        # Of wide and equal intervals, but always more on the same drafts.
        ("typical", "4-bit", 1.0): {n: length + 0.2 + 0.01 * n for n, length in token.items()},
    }
    rows = {row["rule"]: row for row in bench_rules.summarise(lengths)}
    marked = {name: bool(row["within_noise"]) for name, row in rows.items()}
    assert marked == {
        "token": False,
        "match (mlx-lm)": False,
        "block": True,
        "typical (lossy)": False,
    }
    assert bench_rules.cell(rows["block"]) == "2.03 ± 2.50 ~"
    assert rows["token"]["interval"] == pytest.approx(stats.t.interval(0.95, 2, 2, 3**-0.5))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--contexts", "0"], "--contexts: invalid number, expected 1 or more value: '0'"),
        (["--drafts", "0"], "--drafts: invalid number, expected 1 or more value: '0'"),
        (["--temperatures", "-1"], "expected 0 or more"),
        (["--temperatures", "nan"], "expected 0 or more"),
        (["--rules", "x"], "--rules: invalid choice: 'x'"),
        (["--rules", "cascade", "--drafters", "lookup"], "expected one that judges drafts of look"),
        (["--rules", "block", "--drafters", "4-bit-tree"], "expected one that judges drafts of 4"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        bench_rules.main(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_more_contexts_than_a_text_has_tokens_are_refused(folder):
    with pytest.raises(SystemExit, match="--contexts: expected at most "):
        bench_rules.main(["--model", str(folder), "--contexts", "999"])


def test_an_empty_result_is_an_error(folder, capsys, monkeypatch):
    class Nothing(bench_rules.PromptLookup):
        def draft(self, limit, key):
            draft = super().draft(limit, key)
            return draft._replace(draft_tokens=mx.zeros((0,), mx.int32))

    monkeypatch.setattr(bench_rules, "PromptLookup", Nothing)
    monkeypatch.setattr(bench_rules, "make_contexts", lambda *_: [[5, 6, 7], [5, 6, 8]])
    with pytest.raises(SystemExit, match="nothing was drafted"):
        options = ("--contexts", 2, "--drafters", "lookup", "--temperatures", 0)
        run(capsys, "--model", folder, *options)
    assert "lookup: nothing to draft in 2 of 2 contexts" in capsys.readouterr().err
