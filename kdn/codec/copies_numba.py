"""Bytes of many streams into one buffer, from memory or from files, in one call that needs no
interpreter.

A thread that copies stream by stream asks for the interpreter's lock after each of them. Beside an
engine whose own Python runs all the time, waiting for that lock is most of what reading takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from kdn.codec.format import Copy

_libc = ctypes.CDLL(None)
# 64-bit offsets have a name of their own where they are not the only ones.
_pread = getattr(_libc, "pread64", _libc.pread)
_pread.restype = ctypes.c_ssize_t
_pread.argtypes = (ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64)
_memcpy = _libc.memcpy
_memcpy.restype = ctypes.c_size_t
_memcpy.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)


def copy_all(copies: Sequence[Copy], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Each to its address; says which of them came whole. Files may have been cut meanwhile."""
    table = np.array(copies, np.int64).reshape(-1, 3)
    done = np.zeros(len(table), np.bool_)
    _copy_all(table, places, done)
    return done


@njit(nogil=True)
def _copy_all(table, places, done):  # type: ignore[no-untyped-def]
    for i in range(len(table)):
        file, source, count = table[i]
        if file < 0:
            _memcpy(places[i], np.uint64(source), np.uint64(count))
            done[i] = True
            continue
        at = 0
        while at < count:
            found = _pread(
                np.int32(file), places[i] + np.uint64(at), np.uint64(count - at), source + at
            )
            if found <= 0:
                break
            at += found
        done[i] = at == count
