"""The benchmark of the draft head: what it measures in which order, and its figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_head  # noqa: E402


def row(temperature=0.0, rule="token", reached=(10, 4), accepted=(4, 2)):
    return {
        **{"part": "rules", "temperature": temperature, "rule": rule, "kind": "story"},
        **{"cycles": 10, "slot_reached": reached, "slot_accepted": accepted},
    }


def test_another_drafter_comes_first_with_each_prompt_and_round():
    names = ["plain", "head 1", "head 2"]
    for prompt, expected in ((0, ["plain", "head 1"]), (2, ["head 2", "plain"])):
        cases = list(bench_head.cases(["speed"], names, 2, prompt))
        for seed in range(2):
            timed = [c.drafter for c in cases if (c.temperature, c.seed) == (0.7, seed)]
            assert timed[0] == expected[seed] and sorted(timed) == sorted(names)


def test_a_result_of_other_settings_is_not_gone_on_with(tmp_path):
    path, heads = tmp_path / "result.json", (tmp_path / "a", tmp_path / "b")
    for head in heads:
        head.write_bytes(head.name.encode())
    result = bench_head.open_result(path, 128, heads[0])
    bench_head.save_result(path, result)
    assert bench_head.open_result(path, 128, heads[0]) == result
    with pytest.raises(SystemExit, match=r"--max-tokens: expected 128, as in .*json, got 48"):
        bench_head.open_result(path, 48, heads[0])
    with pytest.raises(SystemExit, match=r"--head: expected sha256:\w+, as in .*, got sha256:"):
        bench_head.open_result(path, 128, heads[1])


def test_acceptance_is_of_the_drafts_that_were_reached():
    runs = [row(), row(reached=[5], accepted=[5])]
    assert bench_head.depth_acceptance(runs) == [9 / 15, 2 / 4, 0, 0]


def test_only_what_was_measured_is_shown():
    runs = [row(0.0), row(0.7), row(0.7, "block", accepted=[6, 2])]
    lengths = list(bench_head.tables({"runs": runs}))[1]
    columns = {str(column.header): list(column.cells) for column in lengths.columns}
    assert columns == {
        "T": ["0", "0.7", "1"],
        "match": ["", "", ""],
        "token": ["0.60", "0.60", ""],
        "block": ["", "0.80", ""],
        "coupled": ["", "", ""],
    }


def test_a_missing_matplotlib_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench_head.main([str(tmp_path / "result.json"), "--plots", str(tmp_path)])
    assert "pip install 'exactspec[bench]'" in capsys.readouterr().err
