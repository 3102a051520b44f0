"""A loaded policy refuses observations that are not its own, and says which are."""

import numpy as np
import pytest
import warm
from example_spaces import SPACES

import steadyrl
from steadyrl.core.errors import SettingError

FILTERED = "{FilterObservation: {filter_keys: [b]}}"
SMALL = (
    "agent=ppo", "agent.hidden=[8]", "agent.rollout_steps=8", "agent.epochs=1",
    "agent.minibatches=1", "env.num_envs=1", "total_steps=8", "device=cpu", "eval.every=0",
)  # fmt: skip


@pytest.fixture
def policy_behind(tmp_path):
    """Return a function that trains behind wrappers, innermost first, and loads the policy."""

    def policy(wrappers):
        show = ("env.id=example_spaces:Show-v0", "env.kwargs.kind=dict", f"env.wrappers={wrappers}")
        return steadyrl.load(warm.run(tmp_path, *SMALL, *show, quick=False)[0])

    return policy


@pytest.mark.parametrize(
    ("wrappers", "reason"),
    [
        (
            f"[{FILTERED}, FlattenObservation]",
            "obs=dict: is no array, its space says (4,); the policy takes observations after "
            "env.wrappers: FilterObservation, FlattenObservation",
        ),
        (
            f"[{FILTERED}]",
            "obs=dict: observation has 'a', its space has not; the policy takes observations "
            "after env.wrappers: FilterObservation",
        ),
    ],
)
def test_an_observation_from_before_the_wrappers_is_refused_with_their_names(
    policy_behind, wrappers, reason
):
    policy = policy_behind(wrappers)
    with pytest.raises(SettingError) as refused:
        policy.act(SPACES["dict"].sample())
    assert str(refused.value) == reason
    assert policy.act(policy.observation_space.sample()) in policy.action_space


def test_without_wrappers_none_are_named(policy_behind):
    policy = policy_behind("[]")
    with pytest.raises(SettingError, match=r"^obs=ndarray: is not of Dict\(.*\)$"):
        policy.act(np.zeros(4, np.float32))
