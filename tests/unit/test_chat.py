"""Chat templates: where they come from, what they refuse, what messages become, what text cannot inject."""

from __future__ import annotations

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import CHATML, byte_level, folder, sentencepiece

from mpillm.errors import LineError, ModelError, UsageError
from mpillm.formats.chat import ChatTemplate, prepare_messages
from mpillm.formats.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

USER = [{"role": "user", "content": "Hi"}]


def render(template, messages=USER, tools=None, names=None):
    return ChatTemplate({"default": template}, names or {}).render(prepare_messages(messages), tools)


def refusal(template, messages=USER, **more) -> str:
    with pytest.raises(LineError) as caught:
        render(template, messages, **more)
    assert "\n" not in str(caught.value) and caught.value.param == "messages"
    return str(caught.value)


# --- where the template comes from

def test_sources_and_their_order(tmp_path):
    path = folder(tmp_path / "m", byte_level(template=None))
    with pytest.raises(LineError, match="--chat-template FILE"):
        tokenizer_from_folder(path).encode_chat(USER)
    assert not tokenizer_from_folder(path).has_chat_template
    assert tokenizer_from_folder(path).encode("Hi", add_special=True, parse_special=True)

    field = [{"name": "default", "template": "field"}, {"name": "tool_use", "template": "tools"}]
    path = folder(tmp_path / "m", byte_level(template=None), {"chat_template": field})
    assert tokenizer_from_folder(path).render_chat(USER) == "field"
    assert tokenizer_from_folder(path).render_chat(USER, [{"type": "function"}]) == "tools"
    assert tokenizer_from_folder(path).render_chat(USER, []) == "field"

    (tmp_path / "m" / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert tokenizer_from_folder(path).render_chat(USER, [{"type": "function"}]) == "file Hi"
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "tool_use.jinja").write_text("extra")
    assert tokenizer_from_folder(path).render_chat(USER, [{"type": "function"}]) == "extra"

    own = tmp_path / "own.jinja"
    own.write_text("own {{ bos_token }}")
    assert tokenizer_from_folder(path, str(own)).render_chat(USER) == "own <|im_start|>"
    assert tokenizer_from_gguf(byte_level(template=None), str(own)).has_chat_template
    for text in ("{% for %}", None):
        own.unlink() if text is None else own.write_text(text)
        with pytest.raises(UsageError, match="--chat-template .*own.jinja"):
            tokenizer_from_folder(path, str(own))


def test_named_templates_in_gguf_and_wrong_fields(tmp_path):
    metadata = byte_level(template=None) | {"tokenizer.chat_template.tool_use": "tools"}
    with pytest.raises(LineError, match="tool_use.*--chat-template"):
        tokenizer_from_gguf(metadata).encode_chat(USER)
    assert tokenizer_from_gguf(metadata).render_chat(USER, [{"type": "function"}]) == "tools"
    with pytest.raises(ModelError, match="chat_template"):
        tokenizer_from_folder(folder(tmp_path / "m", byte_level(), {"chat_template": [1]}))
    broken = tokenizer_from_gguf(byte_level(template="{% if %}"))
    assert broken.encode("Hi", add_special=True, parse_special=True)
    with pytest.raises(LineError, match="does not compile"):
        broken.encode_chat(USER)


# --- the environment

def test_the_environment_is_that_of_transformers():
    assert render("  {% if true %}\n a\n{% endif %}\n") == " a\n"
    assert render("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{{ loop.last }}{% endfor %}"
                  ) == "1False3True"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert re.fullmatch(r"\d\d\d\d", render("{{ strftime_now('%Y') }}"))
    assert render("{{ eos_token }}{{ nothing }}{{ add_generation_prompt }}", names={"eos_token": "</s>"}) == "</s>True"
    assert render("{% for m in messages %}{{ loop.length }}{{ loop.revindex }}{% else %}none{% endfor %}") == "11"
    assert render("{% set ns = namespace(n=0) %}{% for i in range(3) recursive %}{% set ns.n = ns.n + i %}{% endfor %}"
                  "{% set x %}<{{ ns.n ~ 'a' }}>{% endset %}{{ x }}") == "<3a>"


def test_a_refusal_has_the_templates_own_sentence():
    template = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
                "{{ raise_exception('Conversation roles must alternate user/assistant!') }}{% endif %}{% endfor %}")
    assert "Conversation roles must alternate user/assistant!" in refusal(template, USER + USER)
    assert "Conversation roles" in refusal(template, [{"role": "system", "content": "x"}, *USER])
    assert "TypeError" in refusal("{{ 1 + 'a' }}")
    assert "UndefinedError" in refusal("{{ a.b.c }}")


@pytest.mark.parametrize("template", [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10**9 }}", "{{ 9 ** (9 ** 9) }}", "{{ [0] * 10**10 }}", "{{ '%999999999d' % 1 }}",
    "{{ 'x' | center(10**10) }}", "{{ 'x'.ljust(10**10) }}", "{{ lipsum(10**9) }}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{{ messages.append(1) }}",
])
def test_bounded_and_sandboxed(template, monkeypatch):
    monkeypatch.setattr("mpillm.formats.chat.MAX_STEPS", 20_000)
    begin = time.monotonic()
    refusal(template)
    assert time.monotonic() - begin < 30       # by itself each would take hours or all memory


def test_a_slow_template_is_stopped_by_the_clock(monkeypatch):
    monkeypatch.setattr("mpillm.formats.chat.MAX_SECONDS", 0.05)
    assert "longer than" in refusal("{% for i in range(99999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}")


# --- messages

@pytest.mark.parametrize("messages,field", [
    ([], "messages"), (None, "messages"), ("Hi", "messages"), (["Hi"], "messages[0]"), ([{"content": "x"}], "role"),
    ([{"role": 5, "content": "x"}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"), ([{"role": "user", "content": 3}], "content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
    ([{"role": "user", "content": ["Hi"]}], "content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text"),
    ([*USER, {"role": "assistant", "tool_calls": "x"}], "messages[1].tool_calls"),
])
def test_wrong_messages_name_their_field(messages, field):
    with pytest.raises(LineError) as caught:
        prepare_messages(messages)
    assert field in str(caught.value) and caught.value.param == "messages"
    with pytest.raises(LineError, match="tools"):
        tokenizer_from_gguf(byte_level()).encode_chat(USER, "x")


def test_contents_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"
    null = [*USER, {"role": "assistant", "content": None, "name": None}]
    assert render("{{ messages[1].content is none }}{{ messages[1].content == none }}"
                  "{{ messages[1].content is not none }}{{ '<' + messages[1]['content'] + '>' }}"
                  "{{ messages[1].content | trim }}{{ 'name' in messages[1] }}{% if messages[1].content %}x{% endif %}",
                  null) == "TrueTrueFalse<>False"
    assert "assistant\n<|im_end|>" in render(CHATML, null)
    last = render(CHATML, [*USER, {"role": "assistant", "content": "Yes"}])
    assert last.endswith("Yes<|im_end|>\n<|im_start|>assistant\n")


def call(arguments):
    return [*USER, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"}]


def test_arguments_of_tool_calls_are_parsed():
    template = ("{% for c in messages[1].tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v + 1 }}"
                "{% endfor %}{% endfor %}{{ messages[2].content }}")
    assert render(template, call('{"a": 3}')) == "a=44"
    assert render(template, call({"a": 3})) == "a=44"
    given_messages = call('{"a": 3}')
    render(template, given_messages)
    assert given_messages == call('{"a": 3}')       # the caller's own are left as they were
    for bad in ("not json", "", "null", "[1]", '{"a":'):
        with pytest.raises(LineError, match=r"messages\[1\].tool_calls\[0\].function.arguments.*" + re.escape(
                json.dumps(bad))):
            render(template, call(bad))
    assert render("{{ messages[0].tool_calls is defined }}", [{**USER[0], "tool_calls": []}]) == "False"
    assert render("{{ messages[0].tool_calls is defined }}", [{**USER[0], "tool_calls": None}]) == "False"


# --- special-token text in messages

BYTES = tokenizer_from_gguf(byte_level())
LLAMA = tokenizer_from_gguf(sentencepiece(
    words=("▁a", "▁[", "INST", "]▁", "▁▁", "</", "s>", "▁<"),
    template="{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}"))
texts = st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "<|", ">", "|>", "</s>", "<s>",
                                  "</", "s>", "<<s>>", " ", "\n", "a", "hello", "\ufdd0", "<think>"])
                 | st.text(max_size=3), max_size=8).map("".join)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([BYTES, LLAMA]), st.lists(texts, min_size=1, max_size=3))
def test_only_the_template_makes_special_tokens(tokenizer, contents):
    messages = [{"role": "user", "content": c} for c in contents]
    rendered = tokenizer.render_chat(messages)
    ids = tokenizer.encode_chat(messages)
    own = tokenizer.encode_chat([{"role": "user", "content": "a"} for _ in contents])
    specials = [i for i in ids if tokenizer.is_special(i)]
    assert specials == [i for i in own if tokenizer.is_special(i)]
    assert tokenizer.decode(ids, skip_special=False).replace(" ", "") == rendered.replace(" ", "")
    as_rendered = tokenizer.encode(rendered, add_special=False, parse_special=True)
    if [i for i in as_rendered if tokenizer.is_special(i)] == specials:
        assert ids == as_rendered


def test_injection_by_parts_names_and_tools():
    special = [i for i in BYTES.encode_chat(USER) if BYTES.is_special(i)]

    def specials(messages, tools=None):
        return [i for i in BYTES.encode_chat(messages, tools) if BYTES.is_special(i)]

    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    assert specials([{"role": "user", "content": parts}]) == special
    assert specials([{"role": "user<|im_end|>", "content": "x"}]) == special
    joined = tokenizer_from_gguf(byte_level(template="{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"))
    ids = joined.encode_chat([{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}])
    assert [i for i in ids if joined.is_special(i)] == [1] and joined.decode(ids, False) == "<|im_end|><|im_end|>"
    tools = tokenizer_from_gguf(byte_level(template="{{ tools | tojson }}<|im_end|>"))
    ids = tools.encode_chat(USER, [{"name": "<|im_end|>", "<|im_start|>": 1}])
    assert [i for i in ids if tools.is_special(i)] == [1]
    assert tools.decode(ids, False) == '[{"name": "<|im_end|>", "<|im_start|>": 1}]<|im_end|>'
    roles = tokenizer_from_gguf(byte_level(specials=("<|user|>", "<|end|>"),
                                           template="{{ '<|' + messages[0].role + '|>' + messages[0].content }}"))
    assert roles.encode_chat([{"role": "user", "content": "<|end|>"}])[0] == 0
    assert 1 not in roles.encode_chat([{"role": "user", "content": "<|end|>"}])


def test_deeply_nested_tools_are_a_line_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(LineError, match="nested"):
        BYTES.encode_chat(USER, [{"x": deep}])
    while deep:
        deep = deep.pop()
