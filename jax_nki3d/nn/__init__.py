# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Layers, one module per library; each needs only the library that it is named after, and none is imported from here."""
