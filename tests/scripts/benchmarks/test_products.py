import pytest
import torch

from scripts.benchmark import OURS, multipliers


@pytest.mark.long
@pytest.mark.parametrize("transposed", [False, True])
def test_all_implementations_compute_the_same(transposed):
    g = torch.Generator().manual_seed(0)
    left = torch.randn(2, 30, 20, generator=g)
    right = torch.randn(2, 20, 10, generator=g)
    right = right.mT.contiguous().mT if transposed else right
    found = {name: torch.stack(list(call())) for name, call in multipliers(left, right).items()}
    assert OURS in found and len(found) > 1
    for name in found:
        torch.testing.assert_close(found[name], torch.bmm(left, right), rtol=1e-5, atol=1e-5)
