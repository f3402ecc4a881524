"""Results as lines of an OpenAI batch output file: dicts for ``formats.jsonl.dumps_strict``."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from mpillm.engine.request import Choice, FailedLine, PromptScore, Request, Result


def result_line(result: Result, tokenizer: Any | None, created: int = 0) -> dict[str, Any]:
    """The result of a line that ran.

    ``created``: the run's start, seconds since 1970. Without a tokenizer texts are empty and tokens are
    named "token_id:N". Each choice has its ``token_ids`` beside what OpenAI's form has.
    """
    request = result.request
    names = _Names(tokenizer)
    chat = request.kind == "chat"
    choices = sorted(result.choices, key=lambda choice: choice.index)
    shown = [_chat_choice(choice, request, names) if chat else _text_choice(choice, result, names)
             for choice in choices]
    prompt_tokens = sum(map(len, request.prompts))
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.line:08d}",
        "object": "chat.completion" if chat else "text_completion", "created": created,
        "model": request.model, "choices": shown,
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
                  "total_tokens": prompt_tokens + completion_tokens}}
    if chat and result.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_table(request.prompts[0], result.prompt_logprobs[0], names)
    return _envelope(request.line, request.custom_id, 200, body, None)


def error_line(failed: FailedLine) -> dict[str, Any]:
    """The result of a line that failed, in both spellings that readers look for.

    ``response`` has the status (4xx; 5xx when the fault was ours) and OpenAI's error body; ``error``
    says the same at the top level.
    """
    kind = "invalid_request_error" if failed.status < 500 else "server_error"
    body = {"error": {"message": failed.message, "type": kind, "param": failed.param, "code": failed.code}}
    return _envelope(failed.line, failed.custom_id, failed.status, body,
                     {"code": failed.code, "message": failed.message})


def _envelope(line: int, custom_id: str | None, status: int, body: dict[str, Any],
              error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{line:08d}", "custom_id": custom_id, "line": line,
            "response": {"status_code": status, "request_id": f"req_{line:08d}", "body": body},
            "error": error}


class _Names:
    """Texts and bytes of single tokens, with and without a tokenizer."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer: Any = tokenizer

    def _known(self, token: int) -> bool:
        # A model may have more rows than its tokenizer has tokens.
        return self.tokenizer is not None and token < self.tokenizer.vocab_size

    def text(self, token: int) -> str:
        return self.tokenizer.token_text(token) if self._known(token) else f"token_id:{token}"

    def bytes(self, token: int) -> bytes | None:
        return self.tokenizer.token_bytes(token) if self._known(token) else None

    def shown(self, tokens: Sequence[int], skip_special: bool) -> str:
        known = [token for token in tokens if self._known(token)]
        return self.tokenizer.decode(known, skip_special) if known else ""

    def table(self, pairs: Sequence[tuple[int, float]]) -> dict[str, float]:
        """{text: logprob}; where two tokens have one text, the later is named by its id."""
        made: dict[str, float] = {}
        for token, logprob in pairs:
            text = self.text(token)
            made[text if text not in made else f"token_id:{token}"] = logprob
        return made


def _end(choice: Choice, request: Request) -> dict[str, Any]:
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason,
            "token_ids": list(choice.token_ids)}


# Chat

def _chat_choice(choice: Choice, request: Request, names: _Names) -> dict[str, Any]:
    logprobs = None
    if request.sampling.logprobs is not None:
        count = request.sampling.logprobs
        tops = choice.top or [[]] * len(choice.token_ids)
        logprobs = {"content": [
            {**_entry(token, logprob, names),
             "top_logprobs": [_entry(other, value, names) for other, value in top[:count]]}
            for token, logprob, top in zip(choice.token_ids, choice.logprobs, tops, strict=True)]}
    return {"index": choice.index, "message": {"role": "assistant", "content": choice.text},
            "logprobs": logprobs, **_end(choice, request)}


def _entry(token: int, logprob: float, names: _Names) -> dict[str, Any]:
    raw = names.bytes(token)
    return {"token": names.text(token), "logprob": logprob, "bytes": None if raw is None else list(raw)}


# Completions

def _text_choice(choice: Choice, result: Result, names: _Names) -> dict[str, Any]:
    sampling, prompt = result.request.sampling, result.request.prompts[choice.item]
    scores = None if result.prompt_logprobs is None else result.prompt_logprobs[choice.item]
    before = names.shown(prompt, sampling.skip_special_tokens) if sampling.echo else ""
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = _logprob_lists(choice.token_ids, choice.logprobs, choice.top, sampling.logprobs, names)
        offsets = _offsets(choice.token_ids, choice.text, len(before), sampling.skip_special_tokens, names)
        if sampling.echo and scores is not None:
            values = [None if score is None else score[0] for score in scores]
            tops = [None if score is None else score[-1] or [] for score in scores]
            of_prompt = _logprob_lists(prompt, values, tops, sampling.logprobs, names)
            logprobs = {name: of_prompt[name] + logprobs[name] for name in logprobs}
            offsets = _offsets(prompt, before, 0, sampling.skip_special_tokens, names) + offsets
        logprobs["text_offset"] = offsets
    made = {"index": choice.index, "text": before + choice.text, "logprobs": logprobs,
            **_end(choice, result.request)}
    if scores is not None:
        made["prompt_logprobs"] = _prompt_table(prompt, scores, names)
    return made


def _logprob_lists(tokens: Sequence[int], values: Sequence[float | None],
                   tops: Sequence[list[tuple[int, float]] | None] | None, count: int,
                   names: _Names) -> dict[str, list[Any]]:
    """tokens, token_logprobs, top_logprobs: the ``count`` best and the token itself; None: no predecessor."""
    tables: list[dict[str, float] | None] = []
    for token, value, top in zip(tokens, values, tops or [[]] * len(tokens), strict=True):
        tables.append(None if value is None else names.table(_with_own(token, value, (top or [])[:count])))
    return {"tokens": [names.text(token) for token in tokens], "token_logprobs": list(values),
            "top_logprobs": tables}


def _with_own(token: int, logprob: float, top: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return top if any(other == token for other, _ in top) else [*top, (token, logprob)]


def _offsets(tokens: Sequence[int], text: str, start: int, skip_special: bool, names: _Names) -> list[int]:
    """Where in the text each token begins: complete characters of the tokens before it.

    Tokens that are not shown take no place; tokens past the text's end (cut at a stop string) stand at
    its end.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for token in tokens:
        offsets.append(start + min(length, len(text)))
        hidden = skip_special and not names.shown([token], True) and names.shown([token], False)
        if not hidden:
            length += len(decoder.decode(names.bytes(token) or b""))
    return offsets


def _prompt_table(prompt: Sequence[int], scores: Sequence[PromptScore | None],
                  names: _Names) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: per token {id: {logprob, decoded_token}}, null for the first."""
    table: list[dict[str, Any] | None] = []
    for token, score in zip(prompt, scores, strict=True):
        if score is None:
            table.append(None)
            continue
        pairs = _with_own(token, score[0], score[-1] or [])
        table.append({str(other): {"logprob": value, "decoded_token": names.text(other)}
                      for other, value in pairs})
    return table
