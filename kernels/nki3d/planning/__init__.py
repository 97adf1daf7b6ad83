# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of the kernels: geometry in, tiles and schedule out. Plain Python: nothing here imports nki."""
