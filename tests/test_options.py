# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice of implementation and of forward mode: argument over context over environment, never stale."""

import threading

import jax
import numpy as np
import pytest

import jax_nki3d
from jax_nki3d import _options

X = np.ones((1, 1, 2, 2, 2), np.float32)
W = np.ones((1, 1, 1, 1, 1), np.float32)


def implementation_of(function, *operands):
    """The implementation that the first operation of a function was traced with."""
    implementation = jax_nki3d.explain(function, *operands, platform="cpu").counts[0][0].implementation
    return implementation.removesuffix(" (asked for)")


def works_in_forward_mode(function):
    try:
        jax.jvp(function, (X,), (X,))
    except TypeError:
        return False
    return True


def test_context_is_seen_by_functions_that_were_compiled_before():
    f = jax.jit(lambda x: jax_nki3d.conv3d(x, W))
    f(X)
    assert not works_in_forward_mode(f)
    with jax_nki3d.options(forward_mode=True):
        assert works_in_forward_mode(f)
    assert not works_in_forward_mode(f)


def test_a_jitted_function_is_traced_again_under_other_options():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return jax_nki3d.conv3d(x, W)

    f(X)
    with jax_nki3d.options(implementation="lax"):
        f(X)
        f(X)
    f(X)
    assert len(traces) == 2


def test_blocks_nest_and_keep_what_they_do_not_name():
    f = lambda x: jax_nki3d.conv3d(x, W)  # noqa: E731
    with jax_nki3d.options(forward_mode=True):
        with jax_nki3d.options(implementation="lax"):
            assert works_in_forward_mode(f)
            with jax_nki3d.options(forward_mode=False):
                assert not works_in_forward_mode(f)
                assert _options.resolve_implementation("conv3d", None) == "lax"
        assert works_in_forward_mode(f)
        assert _options.resolve_implementation("conv3d", None) is None
    assert not works_in_forward_mode(f)


def test_an_argument_wins():
    with jax_nki3d.options(forward_mode=True):
        assert not works_in_forward_mode(lambda x: jax_nki3d.conv3d(x, W, forward_mode=False))
    with jax_nki3d.options(forward_mode=False):
        assert works_in_forward_mode(lambda x: jax_nki3d.conv3d(x, W, forward_mode=True))
    with jax_nki3d.options(implementation="nki"), pytest.raises(NotImplementedError, match="nki is not installed"):
        jax_nki3d.conv3d(X, W)
    with jax_nki3d.options(implementation="simulate"):
        assert implementation_of(lambda x: jax_nki3d.conv3d(x, W), X) == "simulate"
    with jax_nki3d.options(implementation="simulate"):
        assert implementation_of(lambda x: jax_nki3d.conv3d(x, W, implementation="lax"), X) == "lax"


def test_an_error_leaves_the_options_as_they_were():
    with pytest.raises(RuntimeError, match="inside"), jax_nki3d.options(forward_mode=True):
        raise RuntimeError("inside")
    assert not works_in_forward_mode(lambda x: jax_nki3d.conv3d(x, W))


def test_blocks_belong_to_one_thread():
    seen = []
    with jax_nki3d.options(implementation="lax"):
        thread = threading.Thread(target=lambda: seen.append(_options.resolve_implementation("conv3d", None)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_environment_is_the_last_to_be_asked(monkeypatch):
    monkeypatch.setattr(_options, "_ENVIRONMENT", "simulate")
    assert _options.resolve_implementation("conv3d", None) == "simulate"
    assert _options.resolve_implementation("conv3d", "lax") == "lax"
    with jax_nki3d.options(implementation="nki"):
        assert _options.resolve_implementation("conv3d", None) == "nki"


def test_the_backward_pass_uses_what_the_forward_pass_used():
    """A vjp that is pulled back outside the block."""
    with jax_nki3d.options(implementation="lax"):
        _, pullback = jax.vjp(lambda x: jax_nki3d.conv3d(x, W), X)
    assert implementation_of(pullback, X) == "lax"
    jaxpr = jax.make_jaxpr(pullback)(X)
    specs = [eqn.params["spec"] for eqn in jaxpr.jaxpr.eqns if "spec" in eqn.params]
    assert [spec.implementation for spec in specs] == ["lax"]


def test_whether_kernels_are_checked(monkeypatch):
    assert _options.kernels_are_checked()
    with jax_nki3d.options(check_kernels=False):
        assert not _options.kernels_are_checked()
        with jax_nki3d.options(implementation="lax"):
            assert not _options.kernels_are_checked()
    monkeypatch.setattr(_options, "_CHECK", False)
    assert not _options.kernels_are_checked()
    with jax_nki3d.options(check_kernels=True):
        assert _options.kernels_are_checked()
