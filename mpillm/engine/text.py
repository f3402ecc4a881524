"""The text of a sequence as it is generated: bytes joined across tokens, stop strings found.

One story for what a stop string does: the text ends before it (after it with `include_stop`), while token
ids, logprobs and usage keep every token that was generated, the one that completed the stop string included.
The stop string that is completed first wins, wherever it lies in the tokens; of several completed by the same
character, the one that begins first. So the result does not depend on how the text fell into tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mpillm.formats.tokenizer import Tokenizer


class TextStream:
    """The text of one generated sequence after its prompt.

    decode(prompt) + text reads as the whole sequence decodes: a first token keeps its space, and a character
    that the prompt's last tokens began belongs to the text. Each token costs its own length and that of the
    longest stop string, however long the text is. Stop strings are sought in the generated text only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: tuple[str, ...] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        keep_begin: bool = False,
    ) -> None:
        """``keep_begin``: the text's first space is its own, whatever the prompt (a guided text is of its form)."""
        assert all(stop), "an empty stop string would end every text"
        self._tokenizer, self._skip_special, self._include_stop = tokenizer, skip_special, include_stop
        self._stop = tuple(stop)
        self._longest = max(map(len, stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail, begun = self._prompt_tail(prompt_ids)
        self._strip = 0 if begun or keep_begin else tokenizer.strip_left  # spaces still to be taken off the begin
        self._decoder.decode(tail)
        self._broken_prompt = bool(tail)  # decode(prompt) ends in U+FFFD, which is not to come twice
        self._parts: list[str] = []
        self._length = 0  # characters in _parts
        self._recent = ""  # the text's end, as far back as a stop string could have begun
        self._end: int | None = None  # where the text is cut
        self.stopped: str | None = None  # the stop string that was found

    def push(self, token_id: int, search: bool = True) -> str | None:
        """Append a token; the stop string that it completed, if any. No token may follow one that did.

        `search=False` (a token below min_tokens): no stop string ends in this text or begins before its end.
        """
        assert self._end is None, "a token after the stop string"
        new = self._take(self._decoder.decode(self._bytes(token_id)))
        self._append(new, search)
        return self.stopped

    def finish(self) -> str:
        """The final text; bytes that never became a character are U+FFFD in it."""
        if self._end is None:
            self._append(self._take(self._decoder.decode(b"", final=True)), True)
        return "".join(self._parts)[: self._end]

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _prompt_tail(self, prompt_ids: Sequence[int]) -> tuple[bytes, bool]:
        """The bytes of a character that the prompt leaves unfinished, and whether the prompt has any text."""
        end = b""
        for token_id in reversed(prompt_ids):
            end = self._bytes(token_id) + end
            if len(end) >= 4:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(end)
        return decoder.getstate()[0], bool(end)

    def _take(self, text: str) -> str:
        """Decoded text less what is not the sequence's own: leading spaces, the prompt's broken end."""
        if text and self._broken_prompt:
            self._broken_prompt = False
            text = text.removeprefix("\ufffd")
        if text and self._strip:
            spaces = min(len(text) - len(text.lstrip(" ")), self._strip)
            text = text[spaces:]
            self._strip = 0 if text else self._strip - spaces
        return text

    def _append(self, new: str, search: bool) -> None:
        if not new:
            return
        self._parts.append(new)
        before, self._length = self._length, self._length + len(new)
        if not self._longest:
            return
        window = self._recent + new
        if search:
            self._search(window, before - len(self._recent), len(self._recent))
            self._recent = window[max(0, len(window) - self._longest + 1) :]
        else:
            self._recent = ""

    def _search(self, window: str, offset: int, old: int) -> None:
        """Find the first stop string that ends in the new part; `offset` is where the window begins."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = window.find(stop, max(0, old - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is not None:
            end, at, self.stopped = best
            self._end = offset + (end if self._include_stop else at)
