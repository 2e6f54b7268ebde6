"""The fast reader of GGUF files returns what gguf's own returns, in a fraction of its calls."""

import struct
import sys

import gguf
import numpy as np
import pytest

from distill.models.load.gguf_reading import FastReader, read_gguf_fast

PLAIN = FastReader.__mro__[1]  # gguf's own reader, also where `gguf.GGUFReader` has been replaced
BIG, LITTLE = gguf.GGUFEndian.BIG, gguf.GGUFEndian.LITTLE


def write(path, order=LITTLE):
    writer = gguf.GGUFWriter(path, "llama", endianess=order)
    writer.add_uint32("a.number", 7)
    writer.add_string("a.text", "zwei Wörter")
    writer.add_array("tokens", [f"t{number}" * (number % 5) for number in range(300)])  # some are empty
    writer.add_array("scores", [number / 7 for number in range(300)])
    writer.add_array("kinds", list(range(-5, 300)))
    writer.add_array("flags", [True, False, True])
    writer.add_array("one", ["alone"])
    writer.add_bool("a.flag", False)
    writer.add_tensor("x.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("order", [LITTLE, BIG], ids=["this machine's byte order", "the other"])
def test_fields_and_tensors_are_those_of_the_plain_reader(tmp_path, order):
    plain, fast = (kind(write(tmp_path / "m.gguf", order)) for kind in (PLAIN, FastReader))
    assert plain.fields.keys() == fast.fields.keys() and len(plain.fields) > 10
    for name, field in plain.fields.items():
        other = fast.fields[name]
        assert (other.offset, other.data, other.types) == (field.offset, field.data, field.types), name
        assert other.contents() == field.contents(), name
        assert [(part.dtype, part.tobytes()) for part in other.parts] == [
            (part.dtype, part.tobytes()) for part in field.parts
        ], name
    (own,), (other,) = plain.tensors, fast.tensors
    assert own.name == other.name and np.array_equal(own.data, other.data)


def test_a_list_takes_few_calls(tmp_path):
    path, calls = write(tmp_path / "m.gguf"), []

    def count(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.endswith("gguf_reader.py"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        FastReader(path)
    finally:
        sys.setprofile(None)
    assert len(calls) < 300, "one list of 300 texts alone takes the plain reader more"


def test_a_file_that_breaks_off_is_an_error(tmp_path):
    path = write(tmp_path / "m.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"t7t7")])
    with pytest.raises((ValueError, struct.error)):
        FastReader(path)


def test_transformers_reads_by_it(tmp_path, monkeypatch):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    monkeypatch.setattr(gguf, "GGUFReader", None)
    monkeypatch.setattr(gguf, "get_tensor_name_map", gguf.get_tensor_name_map)
    read_gguf_fast()
    read_gguf_fast()
    path = write(tmp_path / "m.gguf")
    assert gguf.GGUFReader is FastReader
    assert load_gguf_checkpoint(path)["config"]["model_type"] == "llama"
    assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
