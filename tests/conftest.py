# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The state of JAX and Hypothesis that every test starts from, and the fixtures that all of them share."""

import os
import zlib

# JAX reads these when it is imported, which happens in pytest_configure and no earlier.
os.environ["JAX_PLATFORMS"] = "cpu"
# Most programs here compile for longer than they run, so LLVM leaves out what would make them faster, which no test measures. What the
# developer's XLA_FLAGS say comes last, and wins.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_force_host_platform_device_count=4 "
    + os.environ.get("XLA_FLAGS", "")
)
# A choice made in the developer's shell must not decide which implementation is tested.
os.environ.pop("JAX_NKI3D_IMPLEMENTATION", None)

import hypothesis
import numpy as np
import pytest

# Every new geometry is compiled, so that an example costs tenths of a second whatever its size: no deadline, few examples.
_COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("ci", max_examples=45, derandomize=True, **_COMMON)
hypothesis.settings.register_profile("explore", max_examples=1000, print_blob=True, **_COMMON)
hypothesis.settings.load_profile("ci")  # pytest --hypothesis-profile=explore looks further


def pytest_configure(config):
    import jax

    # Nothing in the library may lean on implicit promotion: its users are free to forbid it.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def enable_x64():
    """A context in which float64 exists."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # its only name before JAX 0.8, and deprecated after


@pytest.fixture
def x64():
    """The test runs with float64 enabled."""
    with enable_x64():
        yield


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on nothing but the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
