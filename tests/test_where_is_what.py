"""docs/where-is-what.md names modules that exist, in the rooms that it tells newcomers to guess."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kontrast"
PAGE = ROOT / "docs" / "where-is-what.md"
PATH = re.compile(r"`([\w/.-]+(?:/|\.py|\.toml))`")


def rows() -> dict[str, tuple[list[str], list[str]]]:
    """For each question, the rooms or files to guess and the modules that answer it."""
    lines = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return {cells[0].removeprefix("| "): (PATH.findall(cells[1]), PATH.findall(cells[2])) for cells in lines[2:]}


def test_the_page_answers_at_least_ten_questions():
    assert len(rows()) >= 10


@pytest.mark.parametrize("question", rows())
def test_the_answer_exists_in_the_room_one_would_guess(question):
    guesses, answers = rows()[question]
    assert guesses and answers
    assert all((SOURCE / path).exists() for path in [*guesses, *answers])
    assert any(answers[0].startswith(guess) for guess in guesses)
