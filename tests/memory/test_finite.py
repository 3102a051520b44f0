import numpy as np
import pytest
import torch

from memory.errors import NonFiniteError
from memory.finite import check_finite


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy])
def test_the_tensor_the_step_and_the_environment_are_named(bad, make):
    rewards = np.zeros(5, np.float32)
    rewards[3] = bad
    with pytest.raises(NonFiniteError, match=rf"reward is {bad} at step 12,000 in environment 3"):
        check_finite(make(rewards), "reward", step=12_000)


def test_the_element_within_an_observation_is_named():
    observations = np.zeros((4, 2, 3))
    observations[1, 0, 2] = np.nan
    with pytest.raises(NonFiniteError, match=r"environment 1 \(element \[0, 2\]\)"):
        check_finite(observations, "observation", step=0)


def test_a_scalar_has_no_environment():
    with pytest.raises(NonFiniteError, match=r"loss is nan at step 7:") as caught:
        check_finite(torch.tensor(float("nan"), requires_grad=True), "loss", step=7)
    assert caught.value.exit_code == 5


def test_numbers_pass_also_those_whose_sum_is_none():
    check_finite(np.full(4, 3e38, np.float32), "reward", step=0)
    check_finite(torch.full((4,), 3e38), "reward", step=0)
    check_finite(np.zeros((2, 3), np.uint8), "observation", step=0)
    check_finite(torch.zeros(2, dtype=torch.int64), "action", step=0)
    check_finite(np.zeros((0, 3)), "observation", step=0)
