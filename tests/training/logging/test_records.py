"""TensorBoard's own reader and writer agree with records that are written without them."""

import io

import pytest
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.summary.writer.record_writer import RecordWriter

from steadyrl.training.logging.tensorboard import framed

MANY = [b"", b"1", b"123456789", bytes(range(256)) * 5, b"\xff" * 1000]


def read(path):
    reader, found = PyRecordReader_New(str(path)), []
    with pytest.raises(OutOfRangeError):
        while True:
            reader.GetNext()
            found.append(reader.record())
    return found


def test_tensorboard_reads_what_was_written(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(b"".join(map(framed, MANY)))
    assert read(path) == MANY


def test_tensorboard_writes_the_same():
    theirs = io.BytesIO()
    for data in MANY:
        RecordWriter(theirs).write(data)
    assert theirs.getvalue() == b"".join(map(framed, MANY))


@pytest.mark.parametrize("place", [0, 8, 12, -1])
def test_tensorboard_sees_a_byte_that_has_changed(tmp_path, place):
    broken = bytearray(framed(b"123456789"))
    broken[place] ^= 1
    path = tmp_path / "records"
    path.write_bytes(broken)
    with pytest.raises(DataLossError):
        read(path)
