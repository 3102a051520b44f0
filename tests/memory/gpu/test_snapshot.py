"""A profiled run on a card leaves what was allocated when its memory ended."""

from dataclasses import replace

import pytest
import torch

from steadyrl.memory.gpu.limit import limited
from steadyrl.memory.watch import MemoryWatch

MB = 1_000_000
CARD = torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("profile", [False, True])
def test_a_snapshot_is_left_by_a_profiled_run_only(alert_settings, tmp_path, caplog, profile):
    file = tmp_path / "cuda-memory.pickle"
    watch = MemoryWatch(replace(alert_settings, profile=profile), CARD, snapshot=file)
    held = torch.zeros(MB, dtype=torch.uint8, device=CARD)
    limit_mb = torch.cuda.memory_reserved(CARD) // MB + 100
    with pytest.raises(Exception, match="is used up"), limited(CARD, limit_mb):
        torch.zeros(900 * MB, dtype=torch.uint8, device=CARD)
    watch.close()
    assert file.exists() is profile and held.numel() == MB
    if profile:
        content = file.read_bytes()  # not unpickled: it names the allocations and this file
        assert b"device_traces" in content and b"oom" in content
        assert b"test_snapshot.py" in content
        assert any("memory_viz opens it" in message for message in caplog.messages)
    # Nobody writes any more after the run.
    file.unlink(missing_ok=True)
    with pytest.raises(Exception, match="is used up"), limited(CARD, limit_mb):
        torch.zeros(900 * MB, dtype=torch.uint8, device=CARD)
    assert not file.exists()
