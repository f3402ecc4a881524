"""Norms, rotary embedding, activation, sampling; and where compiled kernels are kept."""

import os
import subprocess
import sys

import direct
import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpillm import kernels
from mpillm.errors import LaunchError
from mpillm.jit import elementwise, policy


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same_bits(x, y):
    return np.array_equal(np.ascontiguousarray(x).view(np.uint32), np.ascontiguousarray(y).view(np.uint32))


def test_exponential_is_exact_to_one_ulp_and_right_at_the_ends():
    x = np.concatenate([np.linspace(-104, 88.7, 300001), np.linspace(-1, 1, 10001)]).astype(np.float32)
    ends = np.array([np.inf, -np.inf, np.nan, 88.8, -200, -3e38, 3e38, 0, -0.0], np.float32)
    kernel = elementwise.exponential_kernel()
    y, got = np.empty_like(x), np.empty_like(ends)
    kernel(x, y), kernel(ends, got)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) / np.spacing(exact.astype(np.float32))).max() < 1.0
    np.testing.assert_array_equal(got, np.array([np.inf, 0, np.nan, np.inf, 0, 0, np.inf, 1, 1], np.float32))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 576])
def test_rms_norm(n, monkeypatch):
    x, weight = random(40, n), random(n, seed=1)
    y = direct.rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(y, naive.rms_norm(x, weight, 1e-5), rtol=3e-6, atol=1e-7)
    assert same_bits(direct.rms_norm(x[7:8], weight, 1e-5), y[7:8])
    monkeypatch.setattr(policy._Threads, "count", 3)
    wide = np.concatenate([x, x], 1)
    assert same_bits(direct.rms_norm(wide[:, n:], weight, 1e-5), y)
    assert direct.rms_norm(x, weight, 1e-5, out=x) is x and same_bits(x, y)


def test_what_is_only_read_may_be_read_only():
    x, weight = (np.frombuffer(array.tobytes(), np.float32) for array in (random(3, 16), random(16, seed=1)))
    x = x.reshape(3, 16)
    assert not x.flags.writeable and not weight.flags.writeable
    assert same_bits(direct.rms_norm(x, weight, 1e-5), direct.rms_norm(x.copy(), weight.copy(), 1e-5))
    packer = kernels.Packer("f32", 3, 16)
    packer.put(0, x)
    assert kernels.linear(x, packer.finish(), weight[:3]).shape == (3, 3)
    assert kernels.top_k(x, 2)[0].shape == (3, 2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normed_and_turned_in_place(normed, threads, monkeypatch):
    monkeypatch.setattr(policy._Threads, "count", threads)
    size, rows, n_heads, n_kv = 24, 9, 4, 2
    wide, weights = random(rows, 10 + size * (n_heads + 2 * n_kv)), (random(size, seed=1), random(size, seed=3))
    angle = random(rows, size // 2, seed=2)
    ends = np.cumsum([4, size * n_heads, size * n_kv, size * n_kv, 6])
    before = wide.copy()
    q, k, v = (wide[:, ends[i]:ends[i + 1]] for i in range(3))
    heads = kernels.Heads(size, n_heads, np.array([0, 2], np.int32), np.array([2, 4], np.int32))
    cache = kernels.LayerCache(*kernels.allocate_cache("f32", 1, n_kv, size), "f32")
    expected = []
    for part, weight in zip((q, k), weights, strict=True):
        heads_of = part.reshape(rows, -1, size)
        given = naive.rms_norm(heads_of, weight, 1e-6).reshape(rows, -1) if normed else part
        expected.append(naive.rope(given, np.cos(angle), np.sin(angle), size))
    direct.rope_write(q, k, v, heads, weights if normed else (None, None), 1e-6, cache, np.zeros(rows, np.int32),
                      np.arange(rows, dtype=np.int32), np.zeros((1, 1), np.int32), np.cos(angle), np.sin(angle))
    np.testing.assert_allclose(q, expected[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(k, expected[1], rtol=0, atol=2e-6)
    untouched = np.r_[0:ends[0], ends[2]:wide.shape[1]]
    assert same_bits(wide[:, untouched], before[:, untouched])
    # One K panel holds 16 positions beside each other, one V panel 16 columns of all positions.
    for j in range(n_kv):
        assert same_bits(cache.keys[0, j, 0, :, :rows].T, k[:, j * size:(j + 1) * size])
        values = cache.values[0, j].transpose(1, 0, 2).reshape(kernels.BLOCK, -1)
        assert same_bits(values[:rows, :size], v[:, j * size:(j + 1) * size])


def test_add_norm_adds_the_bias_once_then_the_residual():
    x, y, bias, weight = random(5, 33), random(5, 33, seed=1), random(33, seed=2), random(33, seed=3)
    total = x + (y + bias)
    given = x.copy()
    out = direct.add_norm(given, y.copy(), bias, weight, 1e-5)
    assert same_bits(given, total) and same_bits(out, direct.rms_norm(total, weight, 1e-5))
    given = x.copy()
    direct.add_norm(given, y, None, None, 0.0)
    assert same_bits(given, x + y)


@pytest.mark.parametrize("n", [1, 16, 31, 1536])
def test_silu_mul(n, monkeypatch):
    x = random(5, 2 * n) * 4
    x[0, 0], x[1, 0] = -1e4, 1e4
    y = direct.silu_mul(x)
    np.testing.assert_allclose(y, naive.silu_mul(x), rtol=2e-6, atol=1e-30)
    assert same_bits(direct.silu_mul(x[3:4].copy()), y[3:4])
    monkeypatch.setattr(policy._Threads, "count", 2)
    assert same_bits(direct.silu_mul(x), y)


@settings(max_examples=80, deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 300), elements=st.sampled_from(
    [0.0, -0.0, 1.0, 2.5, -3.0, float("-inf"), 7.0, 1e30])), st.integers(1, 310))
def test_top_k_with_ties(row, k):
    values, ids = kernels.top_k(row[None], k)
    expected, order = naive.top_k(row, k)
    assert ids[0].tolist() == order and values[0].tolist() == expected


@pytest.mark.parametrize("n, k", [(49152, 40), (5000, 5000), (1000, 1), (129, 64)])
def test_top_k_of_rows(n, k, monkeypatch):
    x = random(6, n)
    x[4], x[5] = np.sort(x[4]), -np.sort(-x[5])
    values, ids = kernels.top_k(x, k)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    assert np.array_equal(ids, order) and same_bits(values, np.take_along_axis(x, order, 1))
    monkeypatch.setattr(policy._Threads, "count", 2)
    monkeypatch.setattr(kernels, "_ELEMENTS_PER_THREAD", 1)
    assert np.array_equal(kernels.top_k(x, k)[1], order)


def test_top_k_with_nan_and_nothing():
    x = np.array([[np.nan, 1, np.nan, -np.inf, 3]], np.float32)
    assert kernels.top_k(x, 2)[1].tolist() == [[4, 1]]
    assert kernels.top_k(x, 5)[1].tolist() == [[4, 1, 0, 2, 3]]
    assert kernels.top_k(np.zeros((2, 0), np.float32), 3)[0].shape == (2, 0)


@pytest.mark.parametrize("n", [1, 16, 100, 49152])
def test_log_sum_exp_parts(n):
    x = random(3, n) * 20
    x[2, ::2] = -np.inf
    most, total = kernels.log_sum_exp_parts(x)
    assert np.array_equal(most, x.max(1))
    with np.errstate(invalid="ignore"):
        exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True)).sum(1)
    exact = np.where(x.max(1) == -np.inf, 0, exact)
    np.testing.assert_allclose(total, exact, rtol=5e-7)
    alone = kernels.log_sum_exp_parts(x[1:2])
    assert alone[0][0] == most[1] and alone[1][0] == total[1]


def test_log_sum_exp_tells_nan_and_nothing():
    x = np.full((4, 37), -np.inf, np.float32)
    x[1, 20], x[2, 36], x[2, 3], x[3, 0] = np.nan, np.nan, 4, np.inf
    most, total = kernels.log_sum_exp_parts(x)
    assert most[0] == -np.inf and total[0] == 0 and np.isnan(total[1:]).all()
    most, total = kernels.log_sum_exp_parts(np.zeros((1, 0), np.float32))
    assert most[0] == -np.inf and total[0] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 200000),
       st.floats(0.01, 5), st.floats(0, 10))
def test_gumbel_best_is_the_largest_of_all(n, seed, position, first, temperature, spread):
    x = (np.random.default_rng(n).standard_normal(n) * spread).astype(np.float32)
    x[::7] = -np.inf
    floor = np.float32(np.median(x[np.isfinite(x)])) if n > 1 else np.float32(-np.inf)
    score, index = kernels.gumbel_best(x, temperature, floor, seed, position, first)
    scores = x.astype(np.float64) / temperature + kernels.gumbel_noise(seed, position, first + np.arange(n))
    scores[~((x >= floor) & (x > -np.inf))] = -np.inf
    if np.isneginf(scores).all():
        assert (score, index) == (-np.inf, -1)
    else:
        assert index == scores.argmax() and score == scores.max()


def test_gumbel_noise_is_gumbel_s_and_depends_on_all_three():
    noise = kernels.gumbel_noise(5, 9, np.arange(200000))
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - np.pi ** 2 / 6) < 0.03
    assert len(np.unique(noise)) == len(noise)
    others = [kernels.gumbel_noise(seed, position, np.arange(1000)) for seed, position in ((6, 9), (5, 10))]
    others.append(noise[1:1001])
    for other in others:
        assert abs(np.corrcoef(noise[:1000], other)[0, 1]) < 0.1
    # Recorded: a seed must give the same tokens in later versions.
    recorded = [0.8915854377024423, 1.8773222450483338, -0.4701619162456676]
    again = kernels.gumbel_noise(2**64 - 1, 3, np.array([0, 1, 49151]))
    np.testing.assert_allclose(again, recorded, rtol=1e-12)


def test_a_sample_follows_the_softmax():
    x = np.log(np.array([0.1, 0.2, 0.7], np.float32))
    counts = np.zeros(3)
    for position in range(4000):
        counts[kernels.gumbel_best(x, 1.0, -np.inf, 1, position, 0)[1]] += 1
    assert np.abs(counts / 4000 - [0.1, 0.2, 0.7]).max() < 0.03


def run_python(code, **environment):
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=merged, capture_output=True, text=True, timeout=100)


NORM = "import direct, numpy as np; x = np.ones((3, 16), np.float32); y = direct.rms_norm(x, x[0], 0.0); "


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_threads_in_spite_of_the_environment():
    code = ("import direct, os, numpy as np; from mpillm import kernels; kernels.set_threads(2);"
            "x = np.ones((4096, 16), np.float32); before = len(os.listdir('/proc/self/task'));"
            "y = direct.rms_norm(x, x[0], 0.0); after = len(os.listdir('/proc/self/task'));"
            "print(kernels.threads(), y.sum(), after - before)")
    done = run_python(code, NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")
    assert done.stdout.split() == ["2", "65536.0", "1"], done.stderr


@pytest.mark.parametrize("threads", [1, 2])
def test_no_more_threads_start_than_were_asked_for(threads):
    code = ("import direct, os, numpy as np; from mpillm import kernels; before = len(os.listdir('/proc/self/task'));"
            f"kernels.set_threads({threads}); x = np.ones((4096, 16), np.float32);"
            "y = direct.rms_norm(x, x[0], 0.0); print(len(os.listdir('/proc/self/task')) - before)")
    if threads <= len(os.sched_getaffinity(0)):
        done = run_python(code, OPENBLAS_NUM_THREADS="1")
        assert done.stdout.split() == [str(threads - 1)], done.stderr


def test_too_many_threads_are_one_clear_line():
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(LaunchError, match=f"{cores + 1} threads.*may use {cores} core"):
        kernels.set_threads(cores + 1)
    with pytest.raises(LaunchError, match="at least 1"):
        kernels.set_threads(0)


def test_an_unusable_cache_folder_costs_one_line_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    code = "import logging; logging.basicConfig(); from mpillm import kernels;" + NORM + "print(y.sum())"
    done = run_python(code, NUMBA_CACHE_DIR=str(tmp_path / "file" / "sub"))
    assert done.stdout.split() == ["48.0"], done.stderr
    assert done.stderr.count("compiled in memory") == 1 and len(done.stderr.splitlines()) == 1


def test_a_damaged_cache_costs_one_line_and_nothing_else(tmp_path):
    code = "import logging; logging.basicConfig(); from mpillm import kernels;" + NORM + "print(y.sum())"
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)).stdout.split() == ["48.0"]
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".nbc", ".nbi")]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:70])
    done = run_python(code, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.stdout.split() == ["48.0"], done.stderr
    assert "cached kernel norm" in done.stderr
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)).stderr == ""      # made anew


def test_a_cache_folder_that_others_may_write_is_refused(tmp_path):
    assert policy.private_folder(tmp_path / "mine" / "key") is None
    assert (tmp_path / "mine" / "key").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "writable by others" in policy.private_folder(tmp_path / "open" / "key")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert "not a folder" in policy.private_folder(tmp_path / "link" / "key")
    (tmp_path / "plain").write_text("")
    assert policy.private_folder(tmp_path / "plain" / "key") is not None
    if os.getuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 12345, 12345)
        assert "user 12345" in policy.private_folder(tmp_path / "theirs" / "key")
