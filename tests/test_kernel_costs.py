# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the kernels issue on the benchmark's rows: no more than the bars allow, and as docs/kernels.md says."""

import json
from pathlib import Path

from benchmarks import kernels

REPORT = Path(__file__).parent.parent / "docs" / "kernels.md"


def test_kernels_keep_the_bars_and_the_report_is_current():
    rows = json.loads(kernels.DATA.read_text())["rows"]
    lines = [kernels.line(row, *kernels.run(row)) for row in rows]  # run() compares the values with lax
    missed = [(what, measured) for what, measured, holds in kernels.bars(lines) if not holds]
    assert not missed
    assert kernels.table(lines) in REPORT.read_text(), "make bench-kernels, and commit docs/kernels.md"


def test_a_kernel_that_issues_more_would_miss_the_bars():
    vendor = {"tensor": 100, "vector": 100}
    row = {"name": "dx", "kernel": "dx", "tensor": 101, "vector": 101, "bytes": 2.6, "vendor": vendor}
    assert [holds for _, _, holds in kernels.bars([row])] == [True] + 6 * [False]
