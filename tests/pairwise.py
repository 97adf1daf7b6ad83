# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Grids in which every pair of values of any two factors occurs."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pairwise(
    factors: Mapping[str, Sequence[Any]], rows: int, seed: int, allowed: Callable[[dict], bool] = lambda row: True
) -> list[dict]:
    """At least `rows` rows that hold every pair of values that some allowed row can hold; the same rows for the same seed."""
    rng = random.Random(seed)
    names = list(factors)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    found: list[dict] = []

    def draw(fixed: dict[str, int]) -> dict[str, int]:
        return {name: fixed.get(name, rng.randrange(len(factors[name]))) for name in names}

    def add(indices: dict[str, int]) -> None:
        found.append({name: factors[name][i] for name, i in indices.items()})
        missing.difference_update(itertools.combinations(indices.items(), 2))

    for pair in sorted(missing):
        if pair in missing:
            # the candidate that covers most of what is missing
            candidates = [draw(dict(pair)) for _ in range(40)]
            candidates = [c for c in candidates if allowed({name: factors[name][i] for name, i in c.items()})]
            if candidates:
                add(max(candidates, key=lambda c: len(missing.intersection(itertools.combinations(c.items(), 2)))))
    while len(found) < rows:
        indices = draw({})
        if allowed({name: factors[name][i] for name, i in indices.items()}):
            add(indices)
    return found
