"""The prompts file read twice: the same lines, or an error that names the first other one."""

from __future__ import annotations

import os
import threading

import pytest

from mpillm.errors import InputError, UsageError
from mpillm.formats.prompts import SPOOL, PromptFile, digest_of


def made(tmp_path, content, name="in.jsonl"):
    (tmp_path / name).write_bytes(content)
    (tmp_path / "parts").mkdir(exist_ok=True)
    return PromptFile(str(tmp_path / name), str(tmp_path / "parts"))


def test_lines_are_counted_and_read_again(tmp_path):
    prompts = made(tmp_path, b'\xef\xbb\xbf{"a":1}\r\n\n{"b":2}\n  \n{"c":"\xe2\x80\xa8"}')
    prompts.index()
    assert prompts.count == 3
    prompts.keep()
    assert list(prompts.lines()) == [(0, 1, b'{"a":1}'), (1, 3, b'{"b":2}'), (2, 5, b'{"c":"\xe2\x80\xa8"}')]
    prompts.compare()
    assert prompts.count == 3


@pytest.mark.parametrize(("content", "says"), [
    (b"1\n2\n3\n4\n", "more lines than the 3"), (b"1\n2\n", "has 2 lines, the run began with 3"),
    (b"1\n5\n3\n", "line 2"), (b"3\n2\n1\n", "line 1"), (b"", "has 0 lines"),
    (b"1\n\n2\n3\n", "line 3")])     # results carry line numbers, and two lines must not get one
def test_other_lines_are_named(tmp_path, content, says):
    first = made(tmp_path, b"1\n2\n3\n")
    first.index()
    first.keep()
    with pytest.raises(UsageError, match=says) as error:
        made(tmp_path, content).compare()
    assert "--resume" in str(error.value)


def test_line_ends_and_a_blank_last_line_do_not_count(tmp_path):
    first = made(tmp_path, b"1\n2\n3\n")
    first.index()
    first.keep()
    prompts = made(tmp_path, b"1\r\n2\n3\r\n\n \n")
    prompts.compare()
    assert prompts.count == 3
    assert digest_of(prompts.path) == prompts.digest == first.digest


def test_a_file_that_grows_is_read_to_the_end_that_was_counted(tmp_path):
    prompts = made(tmp_path, b"1\n2\n")
    prompts.index()
    (tmp_path / "in.jsonl").write_bytes(b"1\n2\n3\n")
    assert [index for index, _, _ in prompts.lines()] == [0, 1]


@pytest.mark.parametrize("content", [b"1\n9\n", b"1\n"])
def test_a_file_that_changes_meanwhile_is_noticed(tmp_path, content):
    prompts = made(tmp_path, b"1\n2\n")
    prompts.index()
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="was changed|was cut off"):
        list(prompts.lines())


def test_what_cannot_be_read_twice_is_copied(tmp_path):
    (tmp_path / "parts").mkdir()
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"1\n2\n"))
    writer.start()
    prompts = PromptFile(str(tmp_path / "pipe"), str(tmp_path / "parts"))
    writer.join()
    prompts.index()
    prompts.keep()
    assert [raw for _, _, raw in prompts.lines()] == [b"1", b"2"]
    # Resumed: the copy is there, the FIFO is not asked again
    again = PromptFile(str(tmp_path / "pipe"), str(tmp_path / "parts"), resume=True)
    again.compare()
    assert again.count == 2 and (tmp_path / "parts" / SPOOL).exists()


def test_an_unreadable_file_stops(tmp_path):
    (tmp_path / "parts").mkdir()
    with pytest.raises(InputError, match="does not exist"):
        PromptFile(str(tmp_path / "missing"), str(tmp_path / "parts")).index()
