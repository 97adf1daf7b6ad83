# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Speed on this machine. `python -m benchmarks` compares; nothing here is asserted by a test."""
