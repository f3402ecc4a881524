"""What README and docs/planning.md show is what the program takes and prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mpillm.cli import options, plan
from mpillm.config import parse_size
from mpillm.engine.setup import RUNTIME_BYTES
from mpillm.jit.isa import select
from mpillm.models.load import LOADING_BYTES

README = Path(__file__).resolve().parents[2] / "README.md"
PLANNING = README.parent / "docs" / "planning.md"


def test_the_table_of_options_is_the_programs():
    table = set(re.findall(r"^\| `(--[a-z-]+)", README.read_text(), re.MULTILINE))
    program = {action.option_strings[-1] for action in options.parser()._actions} - {"--help"}
    assert table == program


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target


def test_the_plan_page_has_every_option_of_the_plan():
    synopsis = PLANNING.read_text().split("`--model` is a", 1)[0]
    program = {action.option_strings[-1] for action in plan.parser()._actions} - {"--help"}
    assert set(re.findall(r"--[a-z-]+", synopsis)) == program


def test_the_example_of_the_plan_page_is_what_the_program_prints(monkeypatch, capsys):
    shown = re.search(r"    (mpillm plan [^`]*?) \\\n +--plot plan.png\n\n```\n(.*?)```",
                      PLANNING.read_text().split("## An example", 1)[1], re.DOTALL)
    command, printed = shown.groups()
    monkeypatch.setenv("MPILLM_ISA", "avx2")
    monkeypatch.setenv("MPILLM_ISA_EMULATE", "1")
    monkeypatch.setattr(select._State, "decision", None)
    monkeypatch.chdir(README.parent)
    assert plan.plan(shlex.split(command.replace("\\\n", " "))[2:]) == 0
    assert capsys.readouterr().out == printed


def test_the_constants_of_the_plan_page_are_the_programs():
    sums = re.search(r"The sum has ([^,]*) for Python, MPI and compiled kernels, and ([^.]*) for the buffers",
                     PLANNING.read_text())
    assert [parse_size(size.replace(" ", "")) for size in sums.groups()] == [RUNTIME_BYTES, LOADING_BYTES]


def test_examples_of_the_plans_help_are_accepted(monkeypatch):
    monkeypatch.chdir(README.parent)
    shown = re.findall(r"^  mpillm plan (--model examples/.*)$", plan.EXAMPLES, re.MULTILINE)
    assert len(shown) == 2
    for words in shown:
        fewer = re.sub(r"--ranks [0-9]+", "--ranks 8", words).replace("16GiB", "64GiB")    # counting many takes long
        assert plan.plan(shlex.split(fewer)) == 0, words
