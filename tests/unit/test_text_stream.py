"""Text as it is generated: bytes across tokens, the space after the prompt, stop strings."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_tokenizers import byte_level, sentencepiece

from mpillm.engine.text import TextStream
from mpillm.formats.tokenizer import tokenizer_from_gguf

BYTES = tokenizer_from_gguf(byte_level())
PIECES = tokenizer_from_gguf(sentencepiece())
both = st.sampled_from([BYTES, PIECES])


def run(tokenizer, prompt, ids, stop=(), skip_special=True, include_stop=False):
    stream = TextStream(tokenizer, prompt, stop, skip_special, include_stop)
    for n, i in enumerate(ids):
        found = stream.push(i)
        if found is not None:
            return stream.finish(), found, n + 1
    return stream.finish(), stream.stopped, len(ids)


def tokens(tokenizer):
    """Random ids, the interesting ones often: bytes of emoji, specials, ids that are none."""
    bytes_of = tokenizer.encode("🙂é▁", add_special=False, parse_special=False)
    return st.lists(st.sampled_from([*bytes_of, 0, 1, 2]) | st.integers(0, tokenizer.vocab_size + 2), max_size=20)


@settings(max_examples=150, deadline=None)
@given(both.flatmap(lambda t: st.tuples(st.just(t), tokens(t), tokens(t))), st.booleans())
def test_prompt_and_text_read_as_the_whole(case, skip):
    tokenizer, prompt, ids = case
    whole, before = tokenizer.decode(prompt + ids, skip), tokenizer.decode(prompt, skip)
    text, found, used = run(tokenizer, prompt, ids, skip_special=skip)
    assert found is None and used == len(ids)
    if whole.startswith(before):
        assert before + text == whole
    else:       # the prompt ends inside a character that the sequence completes
        assert before.endswith("\ufffd") and before[:-1] + text == whole


@settings(max_examples=150, deadline=None)
@given(both.flatmap(lambda t: st.tuples(st.just(t), tokens(t))),
       st.lists(st.text(st.sampled_from("abDEF helo🙂é\ufffd\n"), min_size=1, max_size=4), max_size=4), st.booleans())
@example((BYTES, BYTES.encode("aDEFb", add_special=False, parse_special=False)), ["DE", "DEF"], False)
def test_a_stop_string_is_found_exactly_where_the_text_holds_it(case, stop, include):
    tokenizer, ids = case
    full, _, _ = run(tokenizer, [tokenizer.vocab_size - 1], ids)
    text, found, used = run(tokenizer, [tokenizer.vocab_size - 1], ids, tuple(stop), include_stop=include)
    ends = sorted((full.find(s) + len(s), full.find(s), s) for s in stop if s in full)
    if not ends:
        assert found is None and text == full and used == len(ids)
    else:
        end, begin, first = ends[0]
        assert found == first and text == full[:end if include else begin]


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("abDEFhelo 🙂"), max_size=12), st.lists(st.text("abDEFhelo", min_size=1), max_size=3))
def test_the_result_does_not_depend_on_the_tokens(text, stop):
    merged = BYTES.encode(text, add_special=False, parse_special=False)
    single = [i for b in text.encode() for i in range(3, 259) if BYTES.token_bytes(i) == bytes([b])]
    assert run(BYTES, [], merged, tuple(stop))[:2] == run(BYTES, [], single, tuple(stop))[:2]


def test_cases_by_hand():
    def ids(text):
        return BYTES.encode(text, add_special=False, parse_special=False)

    prompt = ids("x")
    assert run(BYTES, prompt, ids("abDEFgh"), ("DE",)) == ("ab", "DE", 3)      # DEF is one token
    assert run(BYTES, prompt, ids("abDEFgh"), ("DE",), include_stop=True) == ("abDE", "DE", 3)
    assert run(BYTES, prompt, ids("one.\n\ntwo"), ("\n\n",))[0] == "one."
    assert run(BYTES, prompt, ids("a stop b"), (" stop ",))[:2] == ("a", " stop ")
    assert run(BYTES, ids("ab"), ids("c"), ("abc", "bc"))[:2] == ("c", None)      # not across the prompt's end
    assert run(BYTES, prompt, ids("🙂")[:2])[0] == "\ufffd"                       # max_tokens inside a character
    assert run(BYTES, prompt, [*ids("🙂")[:2], *ids("ok")])[0] == "\ufffdok"
    assert run(BYTES, ids("🙂")[:2], ids("🙂")[2:])[0] == "🙂"
    assert run(BYTES, ids("🙂")[:2], ids("ok"))[0] == "ok"
    half = ids("é")
    assert run(BYTES, prompt, [half[0], 1, half[1]])[0] == "é"                    # a skipped token between
    assert run(BYTES, prompt, [half[0], 1, half[1]], skip_special=False)[0] == "\ufffd<|im_end|>\ufffd"


def test_the_space_of_the_first_piece_is_kept_after_a_prompt():
    she = PIECES.encode("ab", add_special=True, parse_special=False)
    hello = PIECES._hf.token_to_id("▁Hello")
    two = PIECES._hf.token_to_id("▁▁")
    assert run(PIECES, she, [hello]) == (" Hello", None, 1)
    assert run(PIECES, she, [two, hello]) == ("   Hello", None, 2)
    assert run(PIECES, [1], [hello]) == ("Hello", None, 1)
    assert run(PIECES, [], [two, hello]) == ("  Hello", None, 2)


def test_below_min_tokens_nothing_is_sought():
    stream = TextStream(BYTES, [], ("ab", "bc"), True, False)
    a, b, c = BYTES.encode("abc", add_special=False, parse_special=False)
    assert stream.push(a, search=False) is None and stream.push(b, search=False) is None
    assert stream.push(c) is None and stream.push(a) is None
    assert stream.push(b) == "ab" and stream.finish() == "abc"


def test_a_long_text_costs_the_same_per_token():

    stream = TextStream(BYTES, [], ("zzzz",), True, False)
    token = BYTES.encode("a", add_special=False, parse_special=False)[0]
    for _ in range(5000):
        stream.push(token)
        assert len(stream._recent) <= 3
    assert stream.finish() == "a" * 5000


def test_a_text_of_a_form_keeps_its_first_space():
    (spaced,) = [i for i in range(PIECES.vocab_size) if PIECES.token_bytes(i) == b" Hello"]
    for keep, text in ((False, "Hello"), (True, " Hello")):
        stream = TextStream(PIECES, [1], keep_begin=keep)
        stream.push(spaced)
        assert stream.finish() == text
