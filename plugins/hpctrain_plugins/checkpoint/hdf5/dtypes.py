"""The HDF5 type of each torch dtype, so that other HDF5 tools print the right numbers."""

from __future__ import annotations

import h5py
import numpy as np
import torch

from hpctrain.api import CheckpointError, shown

_NUMPY = {
    torch.bool: "?",
    torch.uint8: "<u1",
    torch.uint16: "<u2",
    torch.uint32: "<u4",
    torch.uint64: "<u8",
    torch.int8: "<i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
}

# Sign bit, exponent's first bit and width, mantissa's first bit and width, exponent bias. They have the form of IEEE 754,
# so HDF5 can describe them as floats.
_SMALL_FLOATS = {
    torch.bfloat16: (15, 7, 8, 0, 7, 127),
    torch.float8_e5m2: (7, 2, 5, 0, 2, 15),
}

# No infinities, or another zero: not in the form of IEEE 754, so no HDF5 float would convert right. Stored as uint8 bits.
_BITS_ONLY = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_NUMPY, *_SMALL_FLOATS, *_BITS_ONLY)}


def name_of(dtype: torch.dtype) -> str:
    """The manifest's name of `dtype`, such as "bfloat16". Raises CheckpointError for an unsupported dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in _BY_NAME:
        raise CheckpointError(f"dtype {name} can't be saved; the hdf5 format holds {', '.join(_BY_NAME)}")
    return name


def by_name(name: str) -> torch.dtype:
    """The dtype with the name `name` in a manifest."""
    if name not in _BY_NAME:
        raise CheckpointError(f"unknown dtype {shown(name)}; expected one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def hdf5_type(dtype: torch.dtype) -> h5py.h5t.TypeID:
    """The HDF5 datatype of a dataset of `dtype`."""
    if dtype in _SMALL_FLOATS:
        sign, exponent_at, exponent_bits, mantissa_at, mantissa_bits, bias = _SMALL_FLOATS[dtype]
        floating = h5py.h5t.IEEE_F32LE.copy()
        floating.set_fields(sign, exponent_at, exponent_bits, mantissa_at, mantissa_bits)
        floating.set_size(dtype.itemsize)
        floating.set_ebias(bias)
        return floating
    return h5py.h5t.py_create(np.dtype(_NUMPY.get(dtype, "<u1")), logical=True)


def is_bits_only(dtype: torch.dtype) -> bool:
    """Whether the dataset holds plain bits, which need the attribute `dtype` to be understood."""
    return dtype in _BITS_ONLY
