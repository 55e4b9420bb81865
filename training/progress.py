"""How far a long task is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Between lines of one task.
LINE_SECONDS = 30.0

T = TypeVar("T")


def make_progress(console: Console) -> Progress:
    if not console.is_terminal:
        return LineProgress(console=console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


class LineProgress(Progress):
    """Prints a line when a task begins, every LINE_SECONDS, and when it ends."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, auto_refresh=False, disable=True)
        self._printed: dict[int, float] = {}

    def add_task(self, description: str, *, total: float, completed: float = 0) -> int:
        task = super().add_task(description, total=total, completed=completed)
        self._print(task)
        return task

    def update(self, task: int, *, completed: float) -> None:
        was_done = self.tasks[task].finished
        super().update(task, completed=completed)
        ends = self.tasks[task].finished and not was_done
        if ends or time.monotonic() - self._printed[task] >= LINE_SECONDS:
            self._print(task)

    def track(self, sequence: Iterable[T], *, total: float, description: str) -> Iterator[T]:
        task = self.add_task(description, total=total)
        for count, item in enumerate(sequence, 1):
            yield item
            self.update(task, completed=count)

    def _print(self, task: int) -> None:
        self._printed[task] = time.monotonic()
        state = self.tasks[task]
        print(
            f"{state.description}: {state.completed:.0f} of {state.total:.0f}",
            file=self.console.file,
            flush=True,
        )
