"""The training command without its training, which needs PyTorch: output and progress."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rich.console import Console

FOLDER = Path(__file__).parents[1] / "training"


@pytest.fixture
def command(monkeypatch):
    """``train_head`` with stand-ins for all that computes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("torch", "card", "evaluation", "head", "sampling", "target", "train"):
        monkeypatch.setitem(sys.modules, name, MagicMock(__version__="2"))
    for name in ("progress", "train_head"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("train_head")
    monkeypatch.setattr(module, "check_against_mlx", lambda: 0.0)
    state = MagicMock(log=[{}], seconds=1.0, epoch=0)
    trained = (MagicMock(), None, MagicMock(), state)
    monkeypatch.setattr(module, "train_on_folder", lambda *_: trained)
    yield module
    for name in ("progress", "train_head"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("given", [None, "elsewhere.safetensors"])
def test_the_packaged_head_is_not_overwritten(command, given, tmp_path):
    data = tmp_path / "data"
    expected = data / "smollm2-135m-head.safetensors" if given is None else tmp_path / given
    command.main(
        data, 10, 10, start_from=None, seed=1, workers=1, slots=1, out=given and tmp_path / given
    )
    assert [call.args[0] for call in command.save_head.call_args_list] == [expected]
    assert [call.args[0] for call in command.write_card.call_args_list] == [expected]


def test_lines_off_a_terminal(command, monkeypatch):
    progress = sys.modules["progress"]
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    file = io.StringIO()
    with progress.make_progress(Console(file=file)) as shown:
        task = shown.add_task("sample", total=100, completed=7)
        for clock.now, done in ((10, 20), (29, 30), (31, 40), (50, 60), (62, 70), (63, 100)):
            shown.update(task, completed=done)
        shown.console.print("cross_entropy 1.0")
        assert list(shown.track("ab", total=2, description="evaluate")) == ["a", "b"]
    assert file.getvalue().splitlines() == [
        "sample: 7 of 100",
        "sample: 40 of 100",
        "sample: 70 of 100",
        "sample: 100 of 100",
        "cross_entropy 1.0",
        "evaluate: 0 of 2",
        "evaluate: 2 of 2",
    ]


def test_a_bar_on_a_terminal(command):
    progress = sys.modules["progress"]
    console = Console(file=io.StringIO(), force_terminal=True)
    assert type(progress.make_progress(console)) is progress.Progress
