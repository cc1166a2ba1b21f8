"""The reference of the commands, from their own help."""

from __future__ import annotations

import re
from typing import Any

import typer

from kontrast.cli.main import app

INTRODUCTION = """# Commands

`kontrast COMMAND --help` prints the same. Two options go before any command: `--version`, and `--import FILE.py`, which
registers your own [objectives, networks and views](../contributing.md). `--debug` after a command shows where an error
came from.

Long work shows its progress on standard error; results go to standard output, and `--json` prints them as one line for
other programs.
[Run folders and exit codes](run-folder.md) says what commands write and how they end."""


def command_page() -> str:
    """Return the page of all commands, in Markdown."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="kontrast")
    parts = [INTRODUCTION]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        parts += section(name, command, typer.Context(command, info_name=f"kontrast {name}"))
    return "\n\n".join(parts) + "\n"


def section(name: str, command: Any, context: Any) -> list[str]:
    """Return the heading, the usage, the text and the tables of a command."""
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"## {name}", f"```sh\nkontrast {name} {usage}\n```"]
    parts += [plain(paragraph) for paragraph in (command.help or "").split("\n\n")]
    shown = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    for kind, title in (("argument", "argument"), ("option", "option")):
        rows = [row(p, context) for p in shown if p.param_type_name == kind]
        if rows:
            parts.append("\n".join([f"| {title} | meaning |", "| --- | --- |", *rows]))
    return parts


def row(parameter: Any, context: Any) -> str:
    """Return the line of an argument or option: what to type, its help, and its default if it says something."""
    names, text = parameter.get_help_record(context) or (parameter.human_readable_name, parameter.help or "")
    typed = " ".join(names.split()).replace(" / ", "` or `")  # a switch and its opposite
    return f"| `{typed}` | {plain(text)} |"


def plain(text: str) -> str:
    """Return help as a line of Markdown; what has brackets, stars or bars in it stays as it is."""
    text = re.sub(r"\s+", " ", text.replace("\b", "")).strip()
    return re.sub(r"([|*<>\[\]_])", r"\\\1", text)
