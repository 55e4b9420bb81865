"""Every planted fault of ``mutants.py`` turns its tests red, in a copy of the project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from exactspec import _ext
from mutants import MUTANTS

ROOT = Path(__file__).parent.parent
COPIED = ("CMakeLists.txt", "pyproject.toml", "cmake", "csrc", "metal", "python", "tests")

# The installed package must not come before the copy, as an editable installation would.
RUN_PYTEST = """
import importlib.util
import sys
from pathlib import Path
sys.meta_path = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
found = importlib.util.find_spec("exactspec").origin
assert Path(found).is_relative_to(Path.cwd()), found
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


class Workspace:
    """A copy of the project with the installed extension; mutants rebuild what they touch."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so", "metal_sim", "mac_check")
                shutil.copytree(source, folder / name, ignore=ignored)
            else:
                shutil.copy(source, folder / name)
        self.install(Path(_ext.__file__))

    def configure(self) -> None:
        command = ["cmake", "-S", ".", "-B", "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        self.run([*command, f"-DPython_EXECUTABLE={sys.executable}"])

    def run(self, command: list[str]) -> None:
        # The tools of this environment, wherever it was activated from.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        result = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert result.returncode == 0, result.stdout

    def build(self) -> None:
        if not (self.folder / "build").exists():
            self.configure()
        self.run(["cmake", "--build", "build", "--target", "_ext"])
        (extension,) = (self.folder / "build").glob("_ext*.so")
        self.install(extension)

    def install(self, extension: Path) -> None:
        # A new file, not new contents: the old one may be mapped.
        target = self.folder / "python" / "exactspec" / extension.name
        target.unlink(missing_ok=True)
        shutil.copy(extension, target)

    def write(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text)
        if not file.endswith(".py"):
            self.build()

    def test(self, tests: tuple[str, ...]) -> dict[str, str]:
        """Run tests; the message of each one, empty if it passed."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        result = subprocess.run(
            [sys.executable, "-c", RUN_PYTEST, "-q", "-p", "no:cacheprovider"]
            + [f"--junitxml={report}", *tests],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder / "python")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert result.returncode in (0, 1), result.stdout
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            assert case.find("error") is None and case.find("skipped") is None, result.stdout
            failure = case.find("failure")
            outcomes[case.get("name")] = "" if failure is None else failure.get("message")
        assert len(outcomes) == len(tests), result.stdout
        return outcomes


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("mutants"))


def test_faults_can_be_planted():
    """The text that each replaces still occurs, once."""
    counts = {m.name: (ROOT / m.file).read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


@pytest.mark.prove
def test_without_a_fault(workspace):
    workspace.build()
    tests = sorted({test for mutant in MUTANTS for test in mutant.tests})
    assert set(workspace.test(tuple(tests)).values()) == {""}


@pytest.mark.quick(mutant=["head: shared noise by column"])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant(workspace, mutant):
    """Each of the fault's tests fails, by an assertion of its own."""
    original = (ROOT / mutant.file).read_text()
    workspace.write(mutant.file, original.replace(mutant.old, mutant.new))
    try:
        outcomes = workspace.test(mutant.tests)
    finally:
        # Written back but not built: the next fault's build takes this file along.
        (workspace.folder / mutant.file).write_text(original)
    survived = [name for name, message in outcomes.items() if not message]
    assert not survived
    for message in outcomes.values():
        assert message.startswith(("AssertionError", "assert ")), message
