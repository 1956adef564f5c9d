"""What a terminal shows."""

from io import StringIO

from rich.console import Console, RenderableType

from bitfoundry.commands import terminal


def shown(what: RenderableType, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, markup=terminal.out._markup)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
