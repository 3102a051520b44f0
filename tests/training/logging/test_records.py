"""Our event records equal those of TensorBoard's own reader and writer."""

import io

import pytest
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
from tensorboard.summary.writer.record_writer import RecordWriter

from steadyrl.training.logging.tensorboard import framed

RECORDS = [b"", b"1", b"123456789", bytes(range(256)) * 5, b"\xff" * 1000]


def read(path):
    reader, found = PyRecordReader_New(str(path)), []
    with pytest.raises(OutOfRangeError):
        while True:
            reader.GetNext()
            found.append(reader.record())
    return found


def test_tensorboard_reads_our_records(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(b"".join(map(framed, RECORDS)))
    assert read(path) == RECORDS


def test_tensorboard_writes_the_same_records():
    theirs = io.BytesIO()
    for data in RECORDS:
        RecordWriter(theirs).write(data)
    assert theirs.getvalue() == b"".join(map(framed, RECORDS))


@pytest.mark.parametrize("position", [0, 8, 12, -1])
def test_tensorboard_detects_a_changed_byte(tmp_path, position):
    broken = bytearray(framed(b"123456789"))
    broken[position] ^= 1
    path = tmp_path / "records"
    path.write_bytes(broken)
    with pytest.raises(DataLossError):
        read(path)
