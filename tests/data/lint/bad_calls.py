# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls that do not agree with the recorded API."""

import numpy as np
from nki.isa import nc_matmul, tensor_copyy  # expect: NKI060

from nki3d import _nki
from nki3d._nki import nisa, nki
from nki3d._nki import nl as language

_PMAX = language.tile_size.pmaxx  # expect: NKI060
_BANK: int = language.tile_size.psum_bank_fmax


@nki.jit
def names(x: language.NkiTenser, dtype=language.float23):  # expect: NKI060
    a: language.NkiTensors = language.zeroes((128, 1), language.float32)  # expect: NKI060
    language.tensor_copy(a, x)  # expect: NKI060
    nisa.matmul_everything(a, x)  # expect: NKI060
    nki.ndarray((1, 1), dtype)  # expect: NKI060
    nisa.memset(a, 0.0, engine=nisa.engine.vektor)  # expect: NKI060
    _nki.nisa.memsett(a, 0.0)  # expect: NKI060
    copy = nisa.tensor_copi  # expect: NKI060
    copy(a, x)
    return a, _PMAX, _BANK


@nki.jit
def calls(x, mask):
    a = language.ndarray((128, 512), language.float32, buffer=language.sbuf)
    p = language.ndarray((128, 512), dtype=language.float32, buffer=language.psum, name="p")
    nisa.tensor_copy(dst=a, source=x)  # expect: NKI061 NKI063
    nisa.tensor_copy(a, x, engin=nisa.engine.vector)  # expect: NKI061
    nisa.memset(a, 0.0, nisa.engine.vector, "name", 1)  # expect: NKI062
    nisa.memset(a, dst=a, value=0.0)  # expect: NKI062
    nisa.memset(a)  # expect: NKI063
    nc_matmul(p, a)  # expect: NKI063
    nc_matmul(p, stationary=a, moving=x, accumulate=True)
    nisa.tensor_tensor(a, a, x, op="add")  # expect: NKI064
    nisa.tensor_tensor(a, a, x, "add")  # expect: NKI064
    nisa.tensor_tensor(a, a, x, op=np.add)  # expect: NKI064
    nisa.tensor_scalar(a, a, op0=language.add, operand0=1.0, op1="multiply", operand1=2.0)  # expect: NKI064
    nisa.tensor_tensor(a, a, x, op=language.add, mask=mask)  # expect: NKI066
    nisa.tensor_tensor(*x, op=language.add)  # expect: NKI041
    q = language.zeros((128, 1), language.float32, buffer="psum")  # expect: NKI065
    r = language.ndarray((128, 1), language.float32, "somewhere")  # expect: NKI065
    language.ds(0, 4, 5)  # expect: NKI062
    language.program_id(axis=0)
    return mine(a, mask=1, buffer="sbuf", op="add"), q, r


def mine(a, mask, buffer, op):
    return a, mask, buffer, op
