"""A library of arrays in device memory, as far as a loss on the device needs one: it reads a capsule of
DLPack by its fields, and lends memory of its own. On a CUDA device it needs the stand-in, whose device
memory is memory of the process."""

import ctypes
from typing import Any

import numpy as np

CPU, CUDA = 1, 2


class DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_number", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


POINTER_OF = ctypes.pythonapi.PyCapsule_GetPointer
POINTER_OF.restype, POINTER_OF.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
RENAME = ctypes.pythonapi.PyCapsule_SetName
RENAME.argtypes = [ctypes.py_object, ctypes.c_char_p]
CAPSULE = ctypes.pythonapi.PyCapsule_New
CAPSULE.restype = ctypes.py_object
CAPSULE.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
#: Names that must live as long as a capsule.
NAME, USED = b"dltensor", b"used_dltensor"


class Taken:
    """The memory of an array, as numpy reads it; the deleter is called at its end."""

    def __init__(self, array: Any, stream: int | None) -> None:
        capsule = array.__dlpack__(stream=stream)
        self.managed = Managed.from_address(POINTER_OF(capsule, NAME))
        RENAME(capsule, USED)
        tensor = self.managed.tensor
        self.device = (tensor.device_kind, tensor.device_number)
        self.shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        self.strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
        self.address = tensor.data + tensor.byte_offset
        kind = {(2, 32): ctypes.c_float, (0, 32): ctypes.c_int32}[tensor.code, tensor.bits]
        count = int(np.prod(self.shape))
        memory = (kind * count).from_address(self.address)
        self.numbers = np.frombuffer(memory, np.dtype(kind), count).reshape(self.shape)

    def __del__(self) -> None:
        self.managed.deleter(ctypes.addressof(self.managed))


class DeviceMemory:
    """Memory of the first CUDA device, from its driver, with a copy of an array."""

    def __init__(self, numbers: Any) -> None:
        self.driver, self.address = ctypes.CDLL("libcuda.so"), ctypes.c_uint64()
        context = ctypes.c_void_p()
        self.ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.ask("cuCtxSetCurrent", context)
        self.ask("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(max(numbers.nbytes, 1)))
        memory = (ctypes.c_byte * numbers.nbytes).from_address(self.address.value)
        self.numbers = np.frombuffer(memory, numbers.dtype).reshape(numbers.shape)
        self.numbers[...] = numbers

    def ask(self, function: str, *arguments: Any) -> None:
        code = self.driver[function](*arguments)
        assert code == 0, f"{function}: {code}"

    def __del__(self) -> None:
        self.ask("cuMemFree_v2", self.address)
        self.ask("cuDevicePrimaryCtxRelease_v2", 0)


class Lent:
    """An array of this library on a device. ``streams`` has the streams that were asked to wait."""

    #: Structures of capsules that were not deleted yet, by address.
    alive: dict[int, Any] = {}

    def __init__(self, numbers: Any, device: tuple[int, int], streams: list[Any] | None = None) -> None:
        self.numbers, self.device = np.ascontiguousarray(numbers), device
        # An array that claims another device is refused before its memory is read, so host memory does.
        self.memory = DeviceMemory(self.numbers) if device == (CUDA, 0) else None
        if self.memory is not None:
            self.numbers = self.memory.numbers
        self.streams = [] if streams is None else streams

    def __mul__(self, factor: float) -> "Lent":
        return Lent(self.numbers * np.float32(factor), self.device, self.streams)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, stream: int | None = None) -> Any:
        """A capsule of the oldest version of the protocol, which has only the stream."""
        self.streams.append(stream)
        extents = (ctypes.c_int64 * self.numbers.ndim)(*self.numbers.shape)
        code = {"f": 2, "i": 0}[self.numbers.dtype.kind]
        managed = Managed(
            DlTensor(self.numbers.ctypes.data, *self.device, self.numbers.ndim, code,
                     self.numbers.itemsize * 8, 1, extents, None, 0),
            None, FORGET,
        )  # fmt: skip
        address = ctypes.addressof(managed)
        Lent.alive[address] = (managed, self.numbers, self.memory, extents)
        return CAPSULE(address, NAME, None)


@DELETER
def FORGET(address: int) -> None:
    del Lent.alive[address]


def cross_entropy(outputs: Any, classes: Any) -> tuple[Any, Any]:
    """The loss of each sample and its gradient, in float32."""
    high = outputs - outputs.max(1, keepdims=True)
    total = np.exp(high).sum(1, keepdims=True)
    rows = np.arange(len(classes))
    losses = np.log(total[:, 0]) - high[rows, classes]
    gradient = np.exp(high) / total
    gradient[rows, classes] -= 1
    return losses.astype(np.float32), gradient.astype(np.float32)
