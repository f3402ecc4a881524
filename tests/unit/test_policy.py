"""What the compiler is told, and how compiled things are named."""

from __future__ import annotations

from mpillm.jit import policy


def test_a_helper_s_name_says_what_it_closes_over():
    """Code that two processes cached is linked by name: two bodies must never share one."""
    def make(flag, inner):
        @policy.helper
        def outer(x):
            return inner(x) + 1 if flag else inner(x)

        return outer

    def doubled(x):
        return x * 2

    def other(x):
        return x

    one, two = policy.helper(doubled), policy.helper(other)
    names = [make(flag, inner).py_func.__name__ for flag in (True, False) for inner in (one, two)]
    assert len(set(names)) == 4 and all(name.startswith("outer_") for name in names)
    assert make(True, one).py_func.__name__ == names[0]
    assert two.py_func.__name__ == "other", "it closes over nothing"
    assert make(True, make(False, one)).py_func.__name__ != make(True, make(True, one)).py_func.__name__
    assert make(True, one)(3) == 7 and make(False, two)(3) == 3
