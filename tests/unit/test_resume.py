"""What a run that goes on is compared with."""

from __future__ import annotations

import json

import pytest

from mpillm.engine import resume
from mpillm.errors import OutputError, UsageError

IDENTITY = {"version": resume.VERSION, "model": "ab", "chat template": None,
            "options": {name: 0 for name in resume.OPTIONS}}


@pytest.mark.parametrize("name", resume.OPTIONS)
def test_an_option_that_changed_is_named(name):
    now = IDENTITY | {"options": IDENTITY["options"] | {name: 7}}
    resume.check_same(IDENTITY, IDENTITY)
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is 7, the run began with 0"):
        resume.check_same(IDENTITY, now)


@pytest.mark.parametrize("name", ["version", "model", "chat template"])
def test_what_else_changed_is_named(name):
    with pytest.raises(UsageError, match=f"the {name} is another one"):
        resume.check_same(IDENTITY, IDENTITY | {name: "other"})


def test_complete_outputs_are_compared_by_options_and_lines():
    attributes = {"identity": json.dumps(IDENTITY), "prompts": "12"}
    resume.check_complete("o.h5", attributes, IDENTITY, "in.jsonl", "12")
    resume.check_complete("o.h5", attributes, IDENTITY, "pipe", "")        # its lines are gone
    resume.check_complete("o.h5", {}, IDENTITY, "in.jsonl", "12")          # a file of an earlier version
    with pytest.raises(UsageError, match="o.h5 is complete, but of other lines than --prompts in.jsonl"):
        resume.check_complete("o.h5", attributes, IDENTITY, "in.jsonl", "13")
    with pytest.raises(UsageError, match="the model is another one"):
        resume.check_complete("o.h5", attributes, IDENTITY | {"model": "cd"}, "in.jsonl", "12")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"identity": 5}'])
def test_a_damaged_description_stops(tmp_path, content):
    assert resume.load(str(tmp_path)) is None
    (tmp_path / resume.FILE).write_text(content)
    with pytest.raises(OutputError, match="move .* away and start afresh"):
        resume.load(str(tmp_path))


def test_what_is_saved_is_loaded(tmp_path):
    resume.save(str(tmp_path), {"identity": IDENTITY, "created": 5})
    assert resume.load(str(tmp_path)) == {"identity": IDENTITY, "created": 5}
    assert [path.name for path in tmp_path.iterdir()] == [resume.FILE]
