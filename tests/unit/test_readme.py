"""The README's table has every option of the program, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from mpillm.cli import options

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_table_of_options_is_the_programs():
    table = set(re.findall(r"^\| `(--[a-z-]+)", README.read_text(), re.MULTILINE))
    program = {action.option_strings[-1] for action in options.parser()._actions} - {"--help"}
    assert table == program


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
