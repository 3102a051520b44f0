import json
import subprocess
import sys

import pytest

PLANTED = {
    "Losses": ("Losses.losses", "tensors float32[] on cpu with their graph"),
    "Episodes": ("Episodes.episode_log", "(bytes)"),
    "Replay": ("Replay.transitions", "(tuple)"),
    "Figures": ("objects of matplotlib",),
    "Environments": ("children are", "open files are", "objects of gymnasium"),
}


@pytest.fixture(scope="module")
def results(request):
    script = request.config.rootpath / "tests/helpers/planted_leaks.py"
    out = subprocess.run(
        [sys.executable, str(script)],
        cwd=request.config.rootpath,
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.long
@pytest.mark.parametrize("leak", PLANTED)
def test_a_planted_leak_is_caught_and_named(results, leak):
    warnings = results[leak]["warnings"]
    assert warnings, f"{leak} was not noticed"
    for clue in PLANTED[leak]:
        assert any(clue in warning for warning in warnings), (clue, warnings)
    assert results[leak]["stopped"] is None


def test_a_leak_is_warned_of_again_only_after_doubling(results):
    assert 1 <= len(results["Episodes"]["warnings"]) <= 3


def test_recorded_losses_are_no_leak(results):
    assert results["RecordedLosses"] == {"warnings": [], "stopped": None}


def test_action_stop_ends_the_run_and_tracemalloc_names_the_line(results):
    trace = results["Traced"]
    assert trace["warnings"] == []
    assert "Episodes.episode_log" in trace["stopped"]
    assert "planted_leaks.py:" in trace["stopped"]


def test_every_warning_is_one_line_with_its_settings(results):
    for leak in PLANTED:
        for warning in results[leak]["warnings"]:
            assert "\n" not in warning
            assert "memory.leak.action=stop" in warning and "memory.leak.tracemalloc" in warning


@pytest.mark.gpu
def test_leaked_cuda_tensors_are_caught(alert_settings, caplog):
    import torch

    from steadyrl.memory.watch import MemoryWatch

    watch = MemoryWatch(alert_settings, torch.device("cuda", 0))
    kept = []
    for number in range(20):
        kept.append(torch.zeros(500, 1000, device="cuda"))
        watch.measure(1000 * number)
    watch.close()
    assert any("CUDA memory grew" in m and "float32[500, 1000]" in m for m in caplog.messages)
