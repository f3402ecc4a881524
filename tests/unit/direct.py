"""Single operations of a step's plan, called like functions: each records a plan of its own and runs it."""

import numpy as np

from mpillm import kernels


def _alone(rows, record):
    plan = kernels.Plan(rows)
    record(plan)
    if rows:
        plan.run_alone(rows)


def rms_norm(x, weight, eps, out=None):
    out = np.empty(x.shape, np.float32) if out is None else out
    _alone(len(x), lambda plan: plan.norm(x, weight, eps, out))
    return out


def add_norm(x, y, bias, weight, eps):
    out = np.empty(x.shape, np.float32)
    _alone(len(x), lambda plan: plan.add_norm(x, y, bias, weight, eps, out))
    return out


def silu_mul(gate_up):
    out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
    _alone(len(gate_up), lambda plan: plan.silu_mul(gate_up, out))
    return out


def _with_cache(rows, record, sequences, positions, table, cos=None, sin=None):
    plan = kernels.Plan(rows)
    record(plan)
    if rows:
        plan.run(kernels.Rows(np.zeros(rows, np.int64), positions, sequences, table, cos, sin), np.zeros(0, np.int64))


def rope_write(q, k, v, heads, norms, eps, cache, sequences, positions, table, cos, sin):
    given = kernels.HeadNorms(*norms, eps)
    _with_cache(len(q), lambda plan: plan.rope_write(q, k, v, heads, given, cache), sequences, positions, table,
                np.ascontiguousarray(cos), np.ascontiguousarray(sin))


def cache_write(k_cache, v_cache, kv_type, k, v, sequences, positions, table):
    """Keys and values as they are: turned by no angle."""
    n_kv, rows = k_cache.shape[1], len(k)
    size = k.shape[1] // n_kv
    heads = kernels.Heads(size, 0, np.zeros(n_kv, np.int32), np.zeros(n_kv, np.int32))
    angles = np.ones((rows, size // 2), np.float32), np.zeros((rows, size // 2), np.float32)
    cache = kernels.LayerCache(k_cache, v_cache, kv_type)
    rope_write(np.zeros((rows, 0), np.float32), k.copy(), v, heads, (None, None), 0.0, cache, sequences, positions,
               table, *angles)


def head_dim(k_cache, kv_type):
    if kv_type == "q8_0":
        return k_cache.shape[2] // 68
    return k_cache.shape[3] * (k_cache.shape[5] if k_cache.ndim == 6 else 1)


def attention(q, k_cache, v_cache, kv_type, starts, stops, sequences, positions, table, scale, window=0):
    size = head_dim(k_cache, kv_type)
    heads = kernels.Heads(size, q.shape[1] // size, starts, stops)
    out = np.empty(q.shape, np.float32)
    angles = np.zeros((len(q), size // 2), np.float32)
    cache = kernels.LayerCache(k_cache, v_cache, kv_type)
    _with_cache(len(q), lambda plan: plan.attention(q, heads, cache, scale, window, out), sequences, positions, table,
                angles, angles)
    return out
