# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""NKI kernels of the 3-D operations. The kernels are not written yet; `jax_nki3d` runs in lax until they are."""

__all__: list[str] = []
