# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Each operation and its gradients with and without jit, with operands on the device and on the host."""

import chex
import jax
import numpy as np
from absl.testing import parameterized
from operations import ROWS


class VariantsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True, without_device=True)
    @parameterized.named_parameters(*((row.name, row) for row in ROWS))
    def test_values_and_gradients(self, row):
        operands = row.operands(np.random.default_rng(7), "float32")
        argnums = tuple(range(len(operands)))

        def loss(function, *operands):
            return sum(y.sum() for y in jax.tree.leaves(function(*operands)))

        ours = self.variant(lambda *o: (row.function(*o), jax.grad(lambda *o: loss(row.function, *o), argnums)(*o)))(*operands)
        expected = row.reference(*operands), jax.grad(lambda *o: loss(row.reference, *o), argnums)(*operands)
        chex.assert_trees_all_equal_shapes_and_dtypes(ours, expected)
        # Sums of integers are exact in float32; SiLU and the division by the window are not.
        chex.assert_trees_all_close(ours, expected, rtol=2e-6, atol=2e-6)
