"""`memory.cuda_limit_mb`: a card as small as configured, for buffers and for updates."""

import pytest
import torch

from steadyrl.core.errors import MemoryBudgetError, SettingError
from steadyrl.memory.budget import require, tightest_bound
from steadyrl.memory.gpu.limit import limited

MB = 1_000_000
CARD = torch.device("cuda", 0)


def room_of_200_mb():
    """Return a limit that leaves this, whatever other tests have left on the card."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(CARD) // MB + 200


def test_a_limit_means_nothing_on_the_host():
    with limited(torch.device("cpu"), 1.0):
        assert torch.zeros(10 * MB, dtype=torch.uint8).numel() == 10 * MB


@pytest.mark.gpu
def test_more_than_the_limit_cannot_be_allocated_and_the_limit_ends_with_the_run():
    message = (
        r"memory\.cuda_limit_mb=\d+ is used up .*Tried to allocate 2\d\d\.\d\d MiB\): raise it"
    )
    with pytest.raises(MemoryBudgetError, match=message), limited(CARD, room_of_200_mb()):
        torch.zeros(100 * MB, dtype=torch.uint8, device=CARD)
        torch.zeros(300 * MB, dtype=torch.uint8, device=CARD)
    torch.zeros(300 * MB, dtype=torch.uint8, device=CARD)


@pytest.mark.gpu
def test_buffers_that_exceed_the_limit_are_refused():
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        pytest.skip("this version of torch cannot be asked for the limit")
    with limited(CARD, room_of_200_mb()):
        require("replay", 50 * MB, device=CARD)
        assert tightest_bound(CARD).free <= 230 * MB
        with pytest.raises(MemoryBudgetError, match=r"memory\.cuda_limit_mb, \d+ MB on cuda:0"):
            require("replay", 300 * MB, device=CARD)


@pytest.mark.gpu
def test_a_limit_above_the_card_s_memory_is_refused():
    with pytest.raises(SettingError, match=r"memory\.cuda_limit_mb=1e\+09"), limited(CARD, 1e9):
        pass
