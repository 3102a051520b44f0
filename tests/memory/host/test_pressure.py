import pytest

from steadyrl.memory.host.pressure import Pressure

MB = 1_000_000
CALM = """\
some avg10=4.00 avg60=0.00 avg300=0.00 total=2
full avg10=0.00 avg60=0.00 avg300=0.00 total=1
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def stalls(path, percent):
    write(path, CALM.replace("full avg10=0.00", f"full avg10={percent:.2f}"))


@pytest.fixture
def machine(tmp_path):
    """Return the machine's pressure file, of a process without control groups."""
    path = tmp_path / "pressure/memory"
    write(path, CALM)
    return path


@pytest.fixture
def group(tmp_path, machine):
    """Return the file of the process's control group, version 2."""
    write(tmp_path / "self/cgroup", "0::/job\n")
    mounted = f"30 23 0:26 / {tmp_path / 'sys'} rw - cgroup2 cgroup2 rw\n"
    write(tmp_path / "self/mountinfo", mounted)
    path = tmp_path / "sys/job/memory.pressure"
    write(path, CALM)
    return path


def test_the_groups_pressure_counts_and_not_the_machines(tmp_path, machine, group):
    pressure = Pressure(tmp_path)
    stalls(machine, 80)
    assert list(pressure.warnings(0)) == []
    stalls(group, 12.5)
    (line,) = pressure.warnings(0)
    assert "waited for memory 12 % of the last 10 seconds" in line and str(group) in line


def test_it_is_said_again_only_when_it_has_doubled(tmp_path, machine):
    pressure, lines = Pressure(tmp_path), []
    for percent in (9, 11, 11, 21, 23, 43, 50):
        stalls(machine, percent)
        lines += pressure.warnings(0)
    assert [line.split(" %")[0].split()[-1] for line in lines] == ["11", "23", "50"]


def test_swap_is_said_from_32_mb_on_and_when_it_doubled(tmp_path):
    pressure = Pressure(tmp_path)
    found = [list(pressure.warnings(mb * MB)) for mb in (0, 31, 40, 79, 80, 100)]
    assert [len(lines) for lines in found] == [0, 0, 1, 0, 1, 0]
    assert "40.0 MB of this run are in swap" in found[2][0]


def test_a_kernel_without_pressure_has_none(tmp_path):
    pressure = Pressure(tmp_path)
    assert pressure.percent() == 0 and list(pressure.warnings(0)) == []


def test_a_damaged_file_is_no_pressure(tmp_path, machine):
    write(machine, "full\nfull avg10=many\n")
    assert Pressure(tmp_path).percent() == 0
