import pytest
import torch

from scripts.benchmark import OURS, multipliers


@pytest.mark.parametrize("turned", [False, True])
def test_all_contestants_compute_the_same(turned):
    g = torch.Generator().manual_seed(0)
    left = torch.randn(2, 30, 20, generator=g)
    right = torch.randn(2, 20, 10, generator=g)
    right = right.mT.contiguous().mT if turned else right
    found = {way: torch.stack(list(call())) for way, call in multipliers(left, right).items()}
    assert OURS in found and len(found) > 1
    for way in found:
        torch.testing.assert_close(found[way], torch.bmm(left, right), rtol=1e-5, atol=1e-5)
