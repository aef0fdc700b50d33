"""Call frames of XLA's typed FFI, read in functions that numba compiles.

A handler gets the address of a call frame and returns that of an error, or 0. XLA promises its C
structs (`xla/ffi/api/c_api.h`) to stay as they are within a major version, so they are read by the
offsets below; all of their fields are words of 8 bytes or padded to them. Version 0.3 is what was
read; XLA is told so, and refuses a handler of a version that it no longer supports.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

MAJOR, MINOR = 0, 3

# XLA_FFI_CallFrame: size, extensions, api, context, stage, then XLA_FFI_Args, _Rets and _Attrs.
_FRAME_SIZE = 168  # up to the end of the attributes; later fields come behind
_EXTENSIONS, _API, _STAGE, _ARGS, _RETS, _ATTRS = 8, 16, 32, 72, 112, 160
_EXECUTE = 3
# XLA_FFI_Metadata_Extension: its base (size, type, next), a pointer to an XLA_FFI_Metadata, which
# is size, XLA_FFI_Api_Version (size, extensions, major, minor) and traits.
_TYPE, _METADATA, _METADATA_TYPE = 8, 24, 1
_MAJOR, _MINOR, _TRAITS = 24, 28, 32
# XLA_FFI_Buffer: size, extensions, dtype, data, rank, dims. XLA_FFI_Scalar: dtype, value.
_DATA, _DIMS, _VALUE = 24, 40, 8
# XLA_FFI_Api: size, extensions, version (24 bytes), internal, Error_Create.
_ERROR_CREATE = 48
_UNIMPLEMENTED = 12

_WORD = ir.IntType(64)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
  """LLVM: the integer `address` as a pointer to `kind`."""
  return builder.inttoptr(address, kind.as_pointer())


def _reader(kind: Any) -> Any:
  @intrinsic
  def read(context: Any, address: Any, offset: Any) -> Any:
    """The number at an address, u64, and an offset in bytes, u64."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
      at = builder.add(*arguments)
      return builder.load(pointer(builder, at, context.get_value_type(kind)))

    return kind(types.uint64, types.uint64), codegen

  return read


word = _reader(types.uint64)
i32 = _reader(types.int32)


@intrinsic
def _store_i32(context: Any, address: Any, offset: Any, value: Any) -> Any:
  def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    address, offset, value = arguments
    at = pointer(builder, builder.add(address, offset), ir.IntType(32))
    builder.store(value, at)
    return context.get_dummy_value()

  return types.void(types.uint64, types.uint64, types.int32), codegen


@intrinsic
def _error(context: Any, create: Any) -> Any:
  """Calls XLA_FFI_Error_Create, u64, and gives the address of the error, u64."""

  def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    text = b"the frame of an FFI call is of a size that jaxserve does not know\0"
    message = context.insert_const_string(builder.module, text[:-1].decode())
    fields = cgutils.alloca_once(builder, ir.ArrayType(_WORD, 4))
    values = (32, 0, builder.ptrtoint(message, _WORD), _UNIMPLEMENTED)
    for i, value in enumerate(values):
      at = builder.gep(fields, [ir.IntType(32)(0), ir.IntType(32)(i)])
      builder.store(value if isinstance(value, ir.Value) else _WORD(value), at)
    kind = ir.FunctionType(_WORD, [_WORD])
    return builder.call(pointer(builder, arguments[0], kind), [builder.ptrtoint(fields, _WORD)])

  return types.uint64(types.uint64), codegen


@njit(inline="always")
def buffer(frame, i):  # type: ignore[no-untyped-def]
  """Address of the numbers of argument `i`."""
  return word(word(word(frame, _ARGS), i * 8), _DATA)


@njit(inline="always")
def dimension(frame, i, axis):  # type: ignore[no-untyped-def]
  """Size of argument `i` along `axis`."""
  return word(word(word(word(frame, _ARGS), i * 8), _DIMS), axis * 8)


@njit(inline="always")
def result(frame, i):  # type: ignore[no-untyped-def]
  """Address of the numbers of result `i`."""
  return word(word(word(frame, _RETS), i * 8), _DATA)


@njit(inline="always")
def attribute(frame, i):  # type: ignore[no-untyped-def]
  """Attribute `i` in the order of names, an int32."""
  return i32(word(word(word(frame, _ATTRS), i * 8), _VALUE), 0)


@njit(inline="always")
def answered(frame):  # type: ignore[no-untyped-def]
  """(whether there is nothing to compute, the error to return then or 0).

  XLA asks for the metadata of a handler in a call with an extension; its other calls name a stage.
  """
  done, error = True, np.uint64(0)
  extension = word(frame, _EXTENSIONS)
  if extension != 0 and i32(extension, _TYPE) == _METADATA_TYPE:
    metadata = word(extension, _METADATA)
    _store_i32(metadata, _MAJOR, MAJOR)
    _store_i32(metadata, _MINOR, MINOR)
    _store_i32(metadata, _TRAITS, 0)
  elif word(frame, 0) < _FRAME_SIZE:
    error = _error(word(word(frame, _API), _ERROR_CREATE))
  elif i32(frame, _STAGE) == _EXECUTE:
    done = False
  return done, error
