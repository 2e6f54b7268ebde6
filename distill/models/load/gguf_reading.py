"""Faster reading of GGUF files by transformers, which parses a file anew for its tokenizer, configuration and weights.

gguf's reader makes several Python calls for each token of the vocabulary, and transformers builds the table of tensor
names once for each module: 15 of 20 seconds for a model of 135 M parameters. Both are replaced in the package `gguf`,
where transformers looks them up at each call; what they return is the same.
"""

from __future__ import annotations

import functools
import struct

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGUFValueType

FieldPart = npt.NDArray[np.generic]
_LENGTH = struct.Struct("<Q")


class FastReader(gguf.GGUFReader):
    """Reader of GGUF files that slices lists in one loop."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[FieldPart], list[int], list[GGUFValueType]]:
        """Return the size, the parts, the indices of the data among them, and the types of a field."""
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        inner = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        begin = orig_offs + 12
        length = int(count[0])
        kind = GGUFValueType(int(inner[0]))
        types = [GGUFValueType.ARRAY, *([kind] if length else [])]
        if kind == GGUFValueType.STRING:
            texts, end = self._texts(begin, length)
            return end - orig_offs, [inner, count, *texts], list(range(3, 3 + 2 * length, 2)), types
        numbers = self.gguf_scalar_to_np.get(kind)
        if numbers is None:  # a list of lists
            return super()._get_field_parts(orig_offs, raw_type)
        values = np.asarray(self._get(begin, numbers, length))  # slices of a memmap cost more than those of an array
        parts = list(values.reshape(length, 1))
        return begin - orig_offs + values.nbytes, [inner, count, *parts], list(range(2, 2 + length)), types

    def _texts(self, offset: int, count: int) -> tuple[list[FieldPart], int]:
        """Return the lengths and bytes of texts in turn, and the offset behind them."""
        data = np.asarray(self.data)
        parts: list[FieldPart] = []
        read = _LENGTH.unpack_from
        for _ in range(count):
            begin = offset + 8
            end = begin + read(data.data, offset)[0]
            parts += [data[offset:begin].view(np.uint64), data[begin:end]]
            offset = end
        return parts, offset


def read_gguf_fast() -> None:
    """Have transformers read GGUF files by `FastReader`, and build each table of tensor names once."""
    if gguf.GGUFReader is not FastReader:
        gguf.GGUFReader = FastReader  # type: ignore[misc]
        gguf.get_tensor_name_map = functools.lru_cache(maxsize=4)(gguf.get_tensor_name_map)
