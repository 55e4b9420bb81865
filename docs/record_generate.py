"""Records a real run of the command line as an SVG image.

python docs/record_generate.py docs/generate.svg generate --compare
"""

from __future__ import annotations

import io
import os
import pty
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 96


def main(image: str, *arguments: str) -> None:
    output = bytearray()

    def read(terminal: int) -> bytes:
        output.extend(data := os.read(terminal, 4096))
        return data

    os.environ.update(COLUMNS=str(WIDTH), TERM="xterm-256color")
    status = pty.spawn(["exactspec", *arguments], read)
    if status:
        sys.exit(f"exactspec ended with status {status}")
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(output.decode().replace("\r\n", "\n")))
    console.save_svg(image, title=" ".join(["exactspec", *arguments]))


if __name__ == "__main__":
    main(*sys.argv[1:])
