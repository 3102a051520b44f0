import numpy as np
import pytest
from scipy.stats import trim_mean

from steadyrl.core.errors import SettingError
from steadyrl.core.safe_parsing import read_yaml
from steadyrl.training.analysis.estimates import interquartile_mean, interval
from steadyrl.training.analysis.normalised import SCORES, Normaliser, iqm

ATARI_100K = """Alien Amidar Assault Asterix BankHeist BattleZone Boxing Breakout ChopperCommand
CrazyClimber DemonAttack Freeway Frostbite Gopher Hero Jamesbond Kangaroo Krull KungFuMaster
MsPacman Pong PrivateEye Qbert RoadRunner Seaquest UpNDown"""


@pytest.mark.parametrize(
    "env",
    ["ALE/MsPacman-v5", "MsPacman-v5", "MsPacmanNoFrameskip-v4", "MsPacman-ramDeterministic-v0"],
)
def test_a_random_policy_has_0_and_a_human_1(env):
    found = Normaliser("atari")(env, np.array([307.3, 6951.6, (307.3 + 6951.6) / 2]))
    np.testing.assert_allclose(found, [0.0, 1.0, 0.5], atol=1e-12)


def test_all_games_of_atari_100k_are_known_and_humans_are_better_than_random():
    ends = read_yaml(SCORES["atari"])
    assert set(ATARI_100K.split()) <= set(ends) and len(ends) == 57
    assert ends["VideoPinball"] == [16256.9, 17667.9]
    assert all(random < human for random, human in ends.values())


@pytest.mark.parametrize(
    ("env", "hint"),
    [
        ("ALE/Pongo-v5", "Pong?"),
        ("CartPole-v1", "of CartPole-v1; compare runs of Atari games only"),
        ("", "unnamed"),
    ],
)
def test_an_unknown_game_is_refused_by_name(env, hint):
    with pytest.raises(SettingError, match="no random and human score of") as error:
        Normaliser("atari")(env, np.zeros(1))
    assert hint in str(error.value)


@pytest.mark.parametrize("runs", [(2, 2, 2), (5, 1, 3), (1, 1), (7,)])
def test_the_estimate_is_the_trimmed_mean_of_scipy(runs):
    games = [np.random.default_rng(many).normal(size=many) for many in runs]
    estimate, (low, high) = iqm(games)
    assert estimate == pytest.approx(trim_mean(np.concatenate(games), 0.25, axis=None))
    assert low <= estimate <= high
    assert (low == high) == (set(runs) == {1})


def test_runs_are_resampled_within_their_game():
    levels = [np.full(3, level) for level in (0.1, 0.5, 4.0, 9.0)]
    estimate, (low, high) = iqm(levels)
    # The middle six of twelve: two games' three runs each.
    assert estimate == low == high == pytest.approx((3 * 0.5 + 3 * 4.0) / 6)


def test_the_interval_of_one_game_is_that_of_its_runs():
    values = np.random.default_rng(1).normal(size=6)
    np.testing.assert_allclose(iqm([values])[1], interval(values, interquartile_mean))


def test_the_interval_of_many_runs_is_that_of_the_normal_approximation():
    # Two games of uniform scores, far apart: trimming takes the lower half of one and the upper
    # half of the other, and the mean of the rest has a closed form.
    random = np.random.default_rng(2)
    games = [random.uniform(0, 1, 4000), random.uniform(5, 6, 4000)]
    estimate, (low, high) = iqm(games)
    # Upper half of [0, 1] and lower half of [5, 6]: means 0.75 and 5.25.
    assert estimate == pytest.approx(3.0, abs=0.01)
    # Above a sample's own median lie p = 1/2 of its n values; the variance of their mean is
    # (σ² + (1 − p) (mean − median)²) / (n p).
    half = 1.96 * np.sqrt((1 / 48 + 1 / 16 / 2) / 2000 / 2)
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
