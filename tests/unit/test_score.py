"""Windows over a text, and the perplexity of their scores."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm import io
from mpillm.engine import score
from mpillm.engine.request import Result
from mpillm.errors import InputError

figures = st.tuples(st.integers(2, 500), st.integers(2, 60)).flatmap(
    lambda two: st.tuples(st.just(two[0]), st.just(two[1]), st.integers(1, two[1] - 1)))


def documented(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, first scored, end) of each window as the loop in transformers' documentation has it."""
    found, previous = [], 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        found.append((begin, max(previous, 1), end))
        previous = end
        if end == tokens:
            break
    return found


@given(figures)
def test_windows_are_those_of_the_documented_loop(figure):
    tokens, window, stride = figure
    windows = [score.window_at(i, *figure) for i in range(score.count_windows(*figure))]
    assert [(w.start, w.first, w.stop) for w in windows] == documented(*figure)
    assert [i for w in windows for i in range(w.first, w.stop)] == list(range(1, tokens)), "each token once"
    assert all(w.first - w.start >= window - stride for w in windows[1:])
    assert all(0 < w.first - w.start and w.stop - w.start <= window for w in windows)


def test_a_text_without_a_scored_token_has_no_window():
    assert [score.count_windows(n, 8, 4) for n in (0, 1, 2, 8, 9, 12, 13)] == [0, 0, 1, 1, 2, 2, 3]


def test_a_window_asks_for_scores_alone():
    made = score.window_at(2, 30, 10, 4).request(list(range(100, 130)), "m")
    assert (made.index, made.prompts) == (2, (list(range(108, 118)),))
    assert (made.sampling.max_tokens, made.sampling.prompt_logprobs, made.sampling.n) == (0, 0, 1)


@given(figures, st.integers(0, 2**32), st.integers(1, 5000))
def test_sums_give_the_mean_and_its_error_in_any_order(figure, seed, nbytes):
    tokens, window, stride = figure
    logprobs = -np.random.default_rng(seed).exponential(3, tokens)
    sink = score.ScoreSink(*figure)
    assert math.isnan(sink.so_far())
    windows = [score.window_at(i, *figure) for i in range(score.count_windows(*figure))]
    for w in random.Random(seed).sample(windows, len(windows)):
        scores = [None, *((float(p), None) for p in logprobs[w.start + 1:w.stop])]
        sink.result(Result(w.request(range(tokens), "m"), [], [], 0, [scores]))
    found = score.perplexity(sink.sums, nbytes)
    nll = -logprobs[1:]
    assert found.tokens == tokens - 1 and found.nll_mean == pytest.approx(nll.mean())
    assert found.perplexity == pytest.approx(math.exp(nll.mean()))
    assert found.bits_per_byte == pytest.approx(nll.sum() / math.log(2) / nbytes)
    assert found == score.perplexity(sorted(sink.sums, key=lambda s: s.index), nbytes)
    assert sink.so_far() == pytest.approx(found.perplexity)
    if tokens == 2:
        assert found.nll_stderr is found.perplexity_stderr is None
    else:
        error = nll.std(ddof=1) / math.sqrt(tokens - 1)
        assert found.nll_stderr == pytest.approx(error, rel=1e-6, abs=1e-9)
        assert found.perplexity_stderr == found.perplexity * found.nll_stderr


def test_the_error_is_that_of_repeated_draws():
    """Texts of 400 independent tokens: the perplexities scatter as the error says."""
    rng = np.random.default_rng(1)
    found = [score.perplexity([score.Sums.of(score.window_at(0, 401, 401, 200), -rng.gamma(2, 1, 400))], 1)
             for _ in range(400)]
    scatter = np.std([f.perplexity for f in found])
    assert np.mean([f.perplexity_stderr for f in found]) == pytest.approx(scatter, rel=0.1)


def test_a_perplexity_beyond_floats_is_infinite():
    sums = [score.Sums.of(score.window_at(0, 3, 3, 1), [-800.0, -801.0])]
    assert score.perplexity(sums, 1).perplexity == math.inf


@given(st.text(alphabet="ab \n\r\té", max_size=300), st.integers(1, 40))
def test_pieces_of_a_text_join_to_it_and_begin_with_words(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(text.encode())
    pieces = list(io.text_pieces(str(path), size))
    assert "".join(pieces) == text and all(pieces)
    assert all(len(piece) < 5 * size + 1 for piece in pieces)
    for before, after in zip(pieces, pieces[1:], strict=False):
        assert (before[-1] == "\n" and not after[0].isspace()) or len(before) >= 4 * size


def test_a_text_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes("na\u00efve".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin is not UTF-8 text: .* \(0xef\)"):
        list(io.text_pieces(str(tmp_path / "latin")))
    with pytest.raises(InputError, match="none: No such file"):
        list(io.text_pieces(str(tmp_path / "none")))
