"""Chat templates: messages checked and made ready, the template rendered in a bounded sandbox.

The environment is set up as transformers does it (trim_blocks, lstrip_blocks, loop controls,
raise_exception, tojson, strftime_now, the generation tag), because templates are written for that.
A rendering may take `MAX_STEPS` loop steps and calls, `MAX_SECONDS` and `MAX_CHARS` characters: a
template that wants more fails its line, whatever it does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

from mpillm.errors import LineError, UsageError

MAX_STEPS = 2_000_000
MAX_SECONDS = 10.0
MAX_CHARS = 16_000_000
_MAX_BITS = 4096


class ChatTemplate:
    """The chat templates of a model, rendered for one conversation at a time.

    `sources` maps names to template texts; `default` is used, or `tool_use` where tools are given and
    there is one. `names` are the special tokens that templates print (bos_token ...). A template that
    does not compile fails the chat lines (completions need none) unless `check()` is called.
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str]) -> None:
        self.sources, self.names = dict(sources), dict(names)
        self._compiled: dict[str, jinja2.Template] = {}
        self._environment: _Sandbox | None = None

    def check(self) -> None:
        """Compile every template; LineError where one has a fault."""
        for name in self.sources:
            self._template(name)

    def render(self, messages: list[dict], tools: list[dict] | None) -> str:
        """The text of a conversation, with the header of the assistant's turn that is to come.

        `messages` as `prepare_messages` gives them. As transformers with add_generation_prompt=True: a last
        turn by the assistant is a finished one, and a new turn begins after it. LineError where the
        template refuses (with its own sentence), fails, or wants more than its bounds.
        """
        template = self._template(self._choose(tools))
        assert self._environment is not None, "a compiled template has an environment"
        budget = self._environment.budget = _Budget()
        parts: list[str] = []
        try:
            for part in template.generate(
                **self.names,
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
            ):
                parts.append(part)
                budget.characters += len(part)
                budget.step()
        except _Refusal as e:
            raise LineError(
                f"the chat template refuses these messages: {e}", param="messages", code="template_refused"
            ) from e
        except _TooMuch as e:
            raise LineError(
                f"the chat template was stopped: {e}", param="messages", code="template_failed"
            ) from e
        except (
            Exception
        ) as e:  # a template runs arbitrary expressions: whatever it raises is its line's error
            raise LineError(
                f"the chat template failed: {type(e).__name__}: {_one_line(e)}",
                param="messages",
                code="template_failed",
            ) from e
        return "".join(parts)

    def _choose(self, tools: list[dict] | None) -> str:
        if not self.sources:
            raise LineError(
                "the model has no chat template, so messages cannot be rendered: "
                "give one with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        if tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" not in self.sources:
            raise LineError(
                f"the model has chat templates named {', '.join(sorted(self.sources))} but no default: "
                "give one with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        return "default"

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if self._environment is None:
                self._environment = _Sandbox()
            try:
                self._compiled[name] = self._environment.compile_bounded(self.sources[name])
            except Exception as e:
                raise LineError(
                    f"the chat template does not compile: {_one_line(e)}; "
                    "give another with --chat-template FILE",
                    param="messages",
                    code="template_failed",
                ) from e
        return self._compiled[name]


def template_from_file(path: str, names: Mapping[str, str]) -> ChatTemplate:
    """The template that the user names; UsageError where it cannot be read or has a fault."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, ValueError) as e:
        raise UsageError(f"--chat-template {path}: cannot be read: {_one_line(e)}") from e
    template = ChatTemplate({"default": text}, names)
    try:
        template.check()
    except LineError as e:
        raise UsageError(f"--chat-template {path}: {_one_line(e)}") from e
    return template


class NullText(str):
    """The content of an assistant's turn without any: none to a template's tests, empty where printed."""

    def __eq__(self, other: object) -> bool:
        return other is None or other == ""

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def prepare_messages(messages: object) -> list[dict]:
    """Check a conversation and return a copy as templates expect it, or raise LineError naming the field.

    Text parts are joined as they are, other parts refused; null fields are left out, an assistant's null
    or absent content becomes NullText; the arguments of tool calls are parsed from their JSON text.
    """
    if not isinstance(messages, list) or not messages:
        raise LineError("messages: must be a list of at least one message", param="messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def prepare_tools(tools: object) -> list[dict] | None:
    """Check the list of tools; None where there are none."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise LineError("tools: must be a list of objects", param="tools")
    return tools or None


def _message(message: object, where: str) -> dict:
    if not isinstance(message, dict):
        raise LineError(f"{where}: must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise LineError(
            f'{where}.role: must be a string such as "user", not {json.dumps(role, default=str)}',
            param="messages",
        )
    ready = {key: value for key, value in message.items() if value is not None and key != "content"}
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise LineError(f"{where}.content: is missing", param="messages")
        ready["content"] = NullText()
    else:
        ready["content"] = _content(content, f"{where}.content")
    if ready.get("tool_calls") == []:
        del ready["tool_calls"]
    if "tool_calls" in ready:
        ready["tool_calls"] = _tool_calls(ready["tool_calls"], f"{where}.tool_calls")
    return ready


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise LineError(f"{where}: must be a string or a list of text parts", param="messages")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise LineError(
                f"{where}[{i}]: a part of type {json.dumps(kind, default=str)} is not supported, "
                "only text is",
                param="messages",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise LineError(f"{where}[{i}].text: must be a string", param="messages")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict]:
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise LineError(f"{where}: must be a list of objects", param="messages")
    ready = []
    for i, call in enumerate(calls):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            text = function["arguments"]
            try:
                arguments = json.loads(text)
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise LineError(
                    f"{where}[{i}].function.arguments: must be the JSON text of an object, "
                    f"not {json.dumps(text[:80])}",
                    param="messages",
                )
            call = {**call, "function": {**function, "arguments": arguments}}
        ready.append(call)
    return ready


# --- the sandbox ---------------------------------------------------------------------------------------


class _Refusal(jinja2.TemplateError):
    """What a template raises itself."""


class _TooMuch(Exception):
    """A bound of the rendering was passed."""


class _Budget:
    """What a rendering has used."""

    def __init__(self) -> None:
        self.steps = self.characters = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _TooMuch(f"it takes more than {MAX_STEPS} steps")
        if self.characters > MAX_CHARS:
            raise _TooMuch(f"its text is longer than {MAX_CHARS} characters")
        if time.monotonic() > self.deadline:
            raise _TooMuch(f"it takes longer than {MAX_SECONDS:g} s")


def _small(value: Any) -> Any:
    if hasattr(value, "__len__") and len(value) > MAX_CHARS:
        raise _TooMuch(f"it makes a value of more than {MAX_CHARS} elements")
    return value


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with every loop, call and growing operation counted.

    Loops and concatenations are wrapped in the syntax tree, the rest through the sandbox's own hooks.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.budget = _Budget()
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters.update(tojson=_tojson, bounded=_bounded, capped=_capped)
        for name in ("center", "indent", "wordwrap", "batch", "slice"):
            self.filters[name] = _narrow(self.filters[name])
        self.tests["none"] = lambda value: value is None or isinstance(value, NullText)

    def compile_bounded(self, source: str) -> jinja2.Template:
        tree = _Bounder(self).visit(self.parse(source))
        return self.from_string(tree)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, B902
        __self.budget.step()
        _check_numbers(args)
        _check_numbers(kwargs.values())
        return _small(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if hasattr(text, "__len__") and isinstance(times, int) and len(text) * times > MAX_CHARS:
                    raise _TooMuch(f"it makes a value of more than {MAX_CHARS} elements")
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = (
                left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            )
            if bits > _MAX_BITS:
                raise _TooMuch(f"it makes a number of more than {_MAX_BITS} bits")
        if operator == "%" and isinstance(left, str) and re.search(r"\d{6}|\*", left):
            raise _TooMuch("it pads text to an enormous width")
        return _small(super().call_binop(context, operator, left, right))


class _Bounder(NodeTransformer):
    """Rewrite a template: loops draw their items through `bounded`, joined text passes `capped`."""

    def __init__(self, environment: _Sandbox) -> None:
        self.environment = environment

    def _filter(self, node: Any, name: str, lineno: int) -> jinja2.nodes.Filter:
        return jinja2.nodes.Filter(
            node, name, [], [], None, None, lineno=lineno, environment=self.environment
        )

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "bounded", node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return self._filter(node, "capped", node.lineno)

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        node.filter = self._filter(node.filter, "capped", node.lineno)
        return node


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks text to train on: here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Scope:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


@jinja2.pass_context
def _bounded(context: Any, items: Any) -> Iterator:
    budget = context.environment.budget
    for item in items:
        budget.step()
        yield item


@jinja2.pass_context
def _capped(context: Any, value: Any) -> Any:
    return _small(value)


def _narrow(function: Callable) -> Callable:
    """A filter that takes widths: none of them beyond the bound on text."""

    @wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args)
        _check_numbers(kwargs.values())
        return function(*args, **kwargs)

    return narrow


def _check_numbers(values: Any) -> None:
    if any(isinstance(v, int) and abs(v) > MAX_CHARS for v in values):
        raise _TooMuch(f"it asks for more than {MAX_CHARS} elements")


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers has it: not escaped for HTML, other alphabets kept."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
