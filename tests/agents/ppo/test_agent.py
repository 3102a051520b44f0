"""The PPO agent in the loop: ratios, minibatches, schedules, state, evaluation, values."""

import copy
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from changed import changed
from ppo_agents import SETTINGS, SPACES, Episodes, act, build, collect, learn

from steadyrl.agents.ppo.transforms import ScaledRewards
from steadyrl.core.errors import NonFiniteError, SettingError
from steadyrl.envs.types import BoxActions, DiscreteActions, EnvSpec, Step


def spy(agent):
    """Record the batch, metrics and loss scalars of every minibatch step."""
    seen, learner = [], agent._learner
    step = learner.train_step

    def record(batch, weight, *numbers):
        result = step(batch, weight, *numbers)
        metrics = dict(zip(learner.means.names[:-1], result.metrics.tolist(), strict=True))
        seen.append((batch, metrics, numbers))
        return result

    learner.train_step = record
    return seen


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_the_first_minibatch_has_ratio_1_and_no_kl(name, normalise):
    agent = build(action=SPACES[name], normalize_obs=normalise, normalize_reward=normalise)
    env = Episodes(scale=3.0)
    _, obs = learn(agent, env, env.reset(), 3)
    collect(agent, env, obs, 16)
    agent._compute_targets()
    batch = next(agent._rollout.minibatches(4, torch.Generator()))
    with torch.no_grad():
        parameters, value = agent._learner.network.module(batch.obs)
        log_prob, _ = agent._actor._head.evaluate(parameters, batch.action)
        ratio = (log_prob - batch.log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-6, rtol=0)
    torch.testing.assert_close(value, batch.value, atol=1e-6, rtol=1e-6)
    seen = spy(agent)
    agent.update()
    assert abs(seen[0][1]["train/approx_kl"]) < 1e-6
    assert seen[0][1]["train/clip_fraction"] == 0
    assert seen[-1][1]["train/approx_kl"] > 1e-6, "later minibatches see a changed policy"


@pytest.mark.parametrize(("envs", "timesteps", "minibatches"), [(3, 16, 4), (1, 7, 3), (5, 13, 64)])
def test_each_valid_sample_is_used_once_per_epoch_in_shuffled_order(envs, timesteps, minibatches):
    agent = build(envs, shape=(1,), rollout_steps=timesteps, minibatches=minibatches, epochs=3)
    seen = spy(agent)
    env = Episodes(envs, (1,), mean_length=3)
    valid = np.empty((0, 1))
    for t in range(timesteps):
        ids = np.arange(envs, dtype=np.float32)[:, None] + t * envs
        step = env.step()
        agent.observe(act(agent, ids), step)
        valid = np.concatenate((valid, ids[step.valid]))
    agent.update()
    used = Counter(torch.cat([batch.obs for batch, *_ in seen]).flatten().tolist())
    assert used == Counter(dict.fromkeys(valid.flatten().tolist(), 3))
    assert 0 < len(valid) < timesteps * envs
    assert all(np.isfinite(list(values.values())).all() for _, values, _ in seen)


@pytest.mark.parametrize("name", SPACES)
def test_minibatches_of_one_sample_are_finite(name):
    agent = build(1, SPACES[name], rollout_steps=5, minibatches=1, batch_size=1)
    seen = spy(agent)
    env = Episodes(1)
    learn(agent, env, env.reset(), 2)
    assert {len(batch.obs) for batch, *_ in seen} == {1}
    assert all(np.isfinite(list(values.values())).all() for _, values, _ in seen)
    assert torch.isfinite(agent._learner.network.weights).all()


def test_batch_size_overrides_minibatches():
    agent = build(3, batch_size=20, minibatches=1)
    seen = spy(agent)
    env = Episodes(mean_length=1e9)
    learn(agent, env, env.reset(), 1)
    assert [len(batch.obs) for batch, *_ in seen] == [16, 16, 16] * 2


def test_a_rollout_without_valid_steps_changes_nothing():
    agent = build(2, rollout_steps=1, minibatches=1)
    before = agent._learner.network.weights.clone()
    no = np.zeros(2, dtype=bool)
    obs = np.zeros((2, 4), dtype=np.float32)
    agent.observe(act(agent, obs), Step(obs, np.zeros(2, dtype=np.float32), no, no, no, ()))
    assert agent.update() is None
    assert torch.equal(agent._learner.network.weights, before)
    assert not agent._rollout.full


def test_the_observation_normaliser_counts_valid_steps_only():
    agent = build(normalize_obs=True)
    env = Episodes(mean_length=3)
    obs, valid, valid_obs = env.reset(), 0, []
    for _ in range(16):
        decision = act(agent, obs)
        step = env.step()
        agent.observe(decision, step)
        valid_obs.append(obs[step.valid])
        valid += step.valid.sum()
        obs = step.obs
    agent.update()
    assert agent._clock.steps == valid < 48
    assert agent._observations.normaliser.count == valid
    truth = np.concatenate(valid_obs).mean(0)
    np.testing.assert_allclose(agent._observations.normaliser.mean.numpy(), truth, rtol=1e-6)


def rates_of(agent, env, total):
    """Train a whole run; return each update's learning rate (in thousandths) and clip."""
    found, obs = [], env.reset()
    while agent._clock.steps < total:
        obs = collect(agent, env, obs, 1)
        rates, before = (agent.learning_rate * 1e3, agent.clip), agent.updates
        weights = agent._learner.network.weights.clone()
        agent.update()
        if agent.updates > before:
            found.append(rates)
            assert not torch.equal(agent._learner.network.weights, weights)
    return found


@pytest.mark.parametrize("beyond", [0, 3, 45])
@pytest.mark.parametrize("rollouts", [1, 2, 10])
def test_learning_rate_starts_full_and_ends_positive(rollouts, beyond):
    total = rollouts * 48 + beyond
    agent = build(total=total, anneal_clip="linear")
    seen = spy(agent)
    found = rates_of(agent, Episodes(mean_length=1e9), total)
    expected = [1 - k * 48 / total for k in range(rollouts)]
    np.testing.assert_allclose(
        found, [(fraction, 0.2 * fraction) for fraction in expected], rtol=1e-12
    )
    _, clip = seen[0][2]
    assert clip == pytest.approx(0.2)


def test_learning_rates_stay_positive_when_resets_add_rollouts():
    total = 10 * 48
    found = rates_of(build(total=total), Episodes(mean_length=3), total)
    rates = [rate for rate, _ in found]
    assert len(rates) > 10
    assert rates[0] == 1
    assert all(before > after > 0 for before, after in pairwise(rates))


def test_runs_shorter_than_one_rollout_are_rejected():
    with pytest.raises(SettingError, match=r"one rollout of 48 steps.*agent\.rollout_steps"):
        build(total=45)
    build(total=46)  # 16 timesteps of 3 environments


def test_learning_rates_are_constant_unless_annealed():
    agent = build(anneal_learning_rate="constant", total=100)
    env = Episodes()
    learn(agent, env, env.reset(), 5)
    assert (agent.learning_rate, agent.clip) == (1e-3, 0.2)


@pytest.mark.parametrize("envs", [1, 3, 8])
def test_schedules_follow_steps_whatever_the_number_of_environments(envs):
    agent = build(envs, total=1000, rollout_steps=10)
    env = Episodes(envs)
    obs = env.reset()
    while agent._clock.steps < 500:
        obs = collect(agent, env, obs, 1)
        agent.update()
    assert 450 < agent._clock._steps_at_rollout_start <= 510
    assert agent.learning_rate == pytest.approx(
        1e-3 * (1 - agent._clock._steps_at_rollout_start / 1000)
    )


def test_exceeding_the_target_kl_stops_the_epochs():
    agent = build(target_kl=1e-9, learning_rate=0.1, epochs=10)
    env = Episodes()
    (found,), _ = learn(agent, env, env.reset(), 1)
    assert agent.updates == 1, "the first step has no KL; the second exceeds the target"
    assert agent._learner.optimizer_state.step == 1, "the exceeding step is undone"
    assert abs(found["train/approx_kl"]) < 1e-6, "and left out of the means"


def state_of(agent):
    return copy.deepcopy(agent.state_dict())


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", SPACES)
def test_evaluation_changes_no_state_and_is_deterministic(name):
    agent = build(action=SPACES[name], normalize_obs=True)
    env = Episodes()
    _, obs = learn(agent, env, env.reset(), 2)
    collect(agent, env, obs, 3)
    before = state_of(agent)
    one = act(agent, np.ones((7, 4), dtype=np.float32), explore=False).env_action
    other = act(agent, np.ones((7, 4), dtype=np.float32), explore=False).env_action
    assert torch.equal(one, other)
    assert same(agent.state_dict(), before)
    assert (one == one[0]).all()


@pytest.mark.parametrize(("terminates", "truth"), [(False, 10.0), (True, 1.0)])
def test_values_at_time_limits_and_terminations(terminates, truth):
    """Constant reward 1 has value 1 / (1 − γ) = 10; time limits must bootstrap.

    Episodes last one step, where the error would be largest; with terminations the value is 1.
    """
    agent = build(4, learning_rate=0.02, anneal_learning_rate="constant", shape=(1,), epochs=8)
    obs, over = np.ones((4, 1), dtype=np.float32), np.zeros(4, dtype=bool)
    for _ in range(60 * 16):
        valid = ~over
        end, no = valid.copy(), np.zeros(4, dtype=bool)
        over = end
        flags = (end, no) if terminates else (no, end)
        agent.observe(act(agent, obs), Step(obs, valid.astype(np.float32), *flags, valid, ()))
        agent.update()
    _, value = agent._learner.network.module(torch.from_numpy(obs))
    assert value.mean().item() == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("at", [0, 5, 16])
def test_a_restored_agent_continues_bitwise(at):
    """Also mid-rollout, and between a full rollout and its update."""
    changes = {"normalize_obs": True, "normalize_reward": True}
    one, other = build(seed=1, **changes), build(seed=2, **changes)
    env = Episodes()
    _, obs = learn(one, env, env.reset(), 2)
    obs = collect(one, env, obs, at)
    other.load_state_dict(state_of(one))
    env_copy = copy.deepcopy(env)
    for agent, world in ((one, env), (other, env_copy)):
        agent.update()
        now = collect(agent, world, obs, 16 - at % 16)
        agent.update()
        collect(agent, world, now, 7)
    assert one.updates == other.updates
    assert same(one.state_dict(), other.state_dict())


def test_the_state_holds_plain_types_and_tensors_only():
    agent = build(normalize_obs=True)
    plain = (torch.Tensor, float, int, str, bool)

    def check(x):
        if isinstance(x, dict):
            assert all(isinstance(k, str) for k in x)
            [check(v) for v in x.values()]
        else:
            assert isinstance(x, plain), type(x)

    check(agent.state_dict())


def test_only_the_seed_determines_the_weights():
    def weights(seed, noise):
        torch.manual_seed(noise)
        agent = build(seed=seed)
        env = Episodes()
        learn(agent, env, env.reset(), 2)
        return agent._learner.network.weights

    assert torch.equal(weights(0, 1), weights(0, 2))
    assert not torch.equal(weights(0, 1), weights(3, 1))
    before = torch.get_rng_state()
    weights_before = before.clone()
    build()
    assert torch.equal(torch.get_rng_state(), weights_before)


def test_rewards_are_scaled_or_clipped_for_learning():
    for changes, expected in (
        ({"clip_reward": True}, lambda r, a: np.clip(r, -1, 1)),
        ({"normalize_reward": True}, lambda r, a: np.clip(r * a._rewards.scale, -10, 10)),
    ):
        agent = build(**changes)
        env = Episodes(scale=5.0, mean_length=1e9)
        obs, raw = env.reset(), []
        for _ in range(16):
            decision, step = act(agent, obs), env.step()
            agent.observe(decision, step)
            raw.append(step.reward)
            obs = step.obs
        agent._compute_targets()
        np.testing.assert_allclose(
            agent._rollout.reward.numpy(), expected(np.array(raw), agent), rtol=1e-5
        )


class UntilRewarded(Episodes):
    """Episodes without rewards until `rewarded` is set."""

    rewarded = False

    def step(self):
        step = super().step()
        return step if self.rewarded else step._replace(reward=np.zeros_like(step.reward))


def outputs(agent):
    """Return the distribution's parameters and the values of some observations."""
    obs = torch.linspace(-1, 1, 32).view(8, 4)
    with torch.no_grad():
        return [each.clone() for each in agent._learner.network.module(obs)]


@pytest.mark.parametrize("rewards", [{}, {"normalize_reward": True}, {"clip_reward": True}])
def test_the_policy_stays_as_it_is_until_a_reward(rewards):
    agent, env = build(entropy_coef=0.0, shared_trunk=False, **rewards), UntilRewarded()
    (policy, value), rate = outputs(agent), agent.learning_rate
    metrics, obs = learn(agent, env, env.reset(), 3)
    (same_policy, other_value) = outputs(agent)
    assert torch.equal(same_policy, policy)
    assert other_value.abs().mean() < 0.9 * value.abs().mean(), "values are learned: of no reward"
    assert metrics[0]["train/value_loss"] > 0 and agent.learning_rate < rate

    env.rewarded = True
    _, obs = learn(agent, env, obs, 1)
    rewarded = outputs(agent)[0]
    assert not torch.equal(rewarded, policy)

    env.rewarded = False  # what was learned counts on: also in a run that is resumed
    resumed = build(entropy_coef=0.0, shared_trunk=False, **rewards)
    resumed.load_state_dict(state_of(agent))
    for each in (agent, resumed):
        learn(each, copy.deepcopy(env), obs, 1)
        assert not torch.equal(outputs(each)[0], rewarded)


def test_an_entropy_bonus_acts_before_the_first_reward():
    agent, env = build(entropy_coef=0.1, shared_trunk=False), UntilRewarded()
    metrics, _ = learn(agent, env, env.reset(), 20)
    assert metrics[-1]["train/entropy"] > metrics[0]["train/entropy"]
    assert metrics[-1]["train/entropy"] == pytest.approx(np.log(3), abs=1e-4)


def play(agent, seen):
    """Collect a rollout of the observations [T, N, …] without episode ends."""
    no = np.zeros(seen.shape[1], dtype=bool)
    for t, obs in enumerate(seen):
        after = seen[min(t + 1, len(seen) - 1)]
        reward = np.ones(len(no), dtype=np.float32)
        agent.observe(act(agent, obs), Step(after, reward, no, no, ~no, ()))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("envs", [1, 3])
def test_first_rollout_is_normalised_by_running_statistics(envs, shared):
    """Host and device actors normalise as the update does; outliers stay distinct."""
    agent = build(envs, shape=(1,), normalize_obs=True, shared_trunk=shared)
    timesteps = (
        np.random.default_rng(0).choice([50.0, 5000.0], size=(16, envs, 1)).astype(np.float32)
    )
    play(agent, timesteps)
    agent._compute_targets()
    assert agent._rollout.obs.abs().max() < 6
    late, seen = timesteps[8:] > 100, agent._rollout.obs[8:].numpy()
    assert seen[late].min() - seen[~late].max() > 1
    batch = next(agent._rollout.minibatches(4, torch.Generator()))
    with torch.no_grad():
        parameters, value = agent._learner.network.module(batch.obs)
        log_prob, _ = agent._actor._head.evaluate(parameters, batch.action)
    torch.testing.assert_close(log_prob, batch.log_prob, atol=1e-6, rtol=0)
    torch.testing.assert_close(value, batch.value, atol=1e-6, rtol=1e-6)
    agent._observations.normaliser.freeze_()
    agent.update()
    truth = (timesteps - timesteps.mean()) / timesteps.std()
    ours = agent._observations.normaliser(torch.from_numpy(timesteps)).numpy()
    np.testing.assert_allclose(ours, truth, atol=1e-4)


def test_observation_statistics_are_frozen_within_later_rollouts():
    agent = build(normalize_obs=True)
    env = Episodes(scale=7.0)
    _, obs = learn(agent, env, env.reset(), 1)
    before = {name: t.clone() for name, t in agent.weights().items() if "normaliser" in name}
    assert before["normaliser.count"] > 0
    collect(agent, env, obs, 15)
    now = agent.weights()
    assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())


def test_actions_are_rescaled_for_the_environment_and_stored_raw():
    inf = float("inf")
    space = BoxActions((-2.0, 0.0, -inf, -1.0), (2.0, 10.0, 3.0, 1.0))
    agent = build(2, space, log_std_init=0.5)
    obs = np.zeros((2, 4), dtype=np.float32)
    decision = act(agent, obs)
    raw_action, env_action = decision.raw_action, decision.env_action
    half_width, center = torch.tensor([2.0, 5.0, 1.0, 1.0]), torch.tensor([0.0, 5.0, 0.0, 0.0])
    torch.testing.assert_close(env_action, raw_action * half_width + center)
    no = np.zeros(2, dtype=bool)
    agent.observe(decision, Step(obs, np.ones(2, np.float32), no, no, ~no, ()))
    assert torch.equal(agent._rollout.action[0], raw_action)
    # The mode is near the centre of the bounds.
    greedy = act(agent, obs, explore=False).env_action
    torch.testing.assert_close(greedy, center.expand(2, 4), atol=0.2, rtol=0)
    raw = act(build(2, space, log_std_init=0.5, scale_actions=False), obs)
    assert torch.equal(raw.env_action, raw_action), "unscaled: the raw sample"


@pytest.mark.parametrize(("size", "squared_length"), [(1, 1), (3, 3), (4, 3), (8, 3)])
def test_noise_is_at_most_as_long_as_in_three_dimensions_by_default(size, squared_length):
    space = BoxActions((-1.0,) * size, (1.0,) * size)
    agent = build(2, space, log_std_init=None)
    deviations = agent._learner.network.module.policy.log_std.detach().exp().tolist()
    assert sum(each**2 for each in deviations) == pytest.approx(squared_length)
    assert len(set(deviations)) == 1


def test_actions_begin_inside_a_half_bounded_space_that_lacks_0():
    inf = float("inf")
    space = BoxActions((100.0, -inf, -1.0, 0.0), (inf, -50.0, inf, inf))
    obs = np.zeros((64, 4), dtype=np.float32)
    env_action = act(build(64, space), obs).env_action
    center = torch.tensor([100.0, -50.0, 0.0, 0.0])
    low, high = torch.tensor(space.low), torch.tensor(space.high)
    inside = (env_action > low) & (env_action < high)
    assert (env_action - center).abs().max() < 10
    assert inside.any(0).all(), "all actions of a dimension would be clipped to its bound"


def test_rollout_memory_is_allocated_once():
    agent = build()
    env = Episodes()
    names = ("obs", "action", "log_prob", "value", "advantage", "return_", "reward")
    before = [getattr(agent._rollout, name).data_ptr() for name in names]
    nbytes = agent.nbytes()
    learn(agent, env, env.reset(), 5)
    assert [getattr(agent._rollout, name).data_ptr() for name in names] == before
    assert agent.nbytes() == nbytes


def test_a_nan_loss_stops_the_run():
    agent = build()
    env = Episodes(scale=float("inf"))
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError, match="train/loss"):
        learn(agent, env, env.reset(), 1)


def test_metrics_are_within_their_ranges():
    agent = build()
    env = Episodes()
    found, _ = learn(agent, env, env.reset(), 3)
    for metrics in found:
        assert 0 <= metrics["train/clip_fraction"] <= 1
        assert 0 < metrics["train/entropy"] <= np.log(3) + 1e-6
        assert metrics["train/explained_variance"] <= 1
    assert agent.scalars() == {
        "train/learning_rate": agent.learning_rate,
        "train/clip": 0.2,
        "train/entropy_coef": 0.01,
    }


def test_ppo_learns_from_images():
    agent = build(2, shape=(4, 36, 36), dtype="uint8", rollout_steps=4, minibatches=2)
    random = np.random.default_rng(0)
    no, yes = np.zeros(2, dtype=bool), np.ones(2, dtype=bool)
    for _ in range(4):
        obs = random.integers(0, 256, (2, 4, 36, 36), dtype=np.uint8)
        agent.observe(act(agent, obs), Step(obs, np.ones(2, np.float32), no, no, yes, ()))
    metrics = agent.update()
    assert torch.isfinite(metrics.values).all()
    assert agent._rollout.obs.dtype == torch.uint8


def test_settings_that_do_not_fit_the_environment_are_rejected():
    spec = EnvSpec("Small", 2, (4,), "float32", 1, DiscreteActions(2))
    images = EnvSpec("Images", 2, (1, 84, 84), "uint8", 4, DiscreteActions(2))
    SETTINGS.validate_fit(spec, 1000)
    for changes, where, key in (
        ({"minibatches": 33}, spec, "agent.minibatches"),
        ({"batch_size": 33}, spec, "agent.batch_size"),
        ({"normalize_obs": True}, images, "agent.normalize_obs"),
    ):
        with pytest.raises(SettingError, match=key):
            changed(SETTINGS, **changes).validate_fit(where, 1000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("gamma", 1.1),
        ("gae_lambda", -0.1),
        ("rollout_steps", 0),
        ("epochs", 0),
        ("minibatches", 0),
        ("batch_size", 0),
        ("clip", 0.0),
        ("entropy_coef", -1.0),
        ("max_grad_norm", -1.0),
        ("target_kl", 0.0),
        ("grad_accumulation", 0),
        ("hidden", ()),
        ("hidden", (10**30,)),
        ("learning_rate", 1e308),
        ("epochs", 10**30),
        ("clip", 1e308),
        ("entropy_coef", 1e308),
        ("value_coef", 1e308),
        ("max_grad_norm", 1e308),
        ("target_kl", 1e308),
        ("grad_accumulation", 10**30),
        ("log_std_init", 1e308),
    ],
)
def test_settings_out_of_range_are_rejected(field, value):
    with pytest.raises(SettingError) as refused:
        replace(SETTINGS, **{field: value})
    assert refused.value.field == field


def test_clipping_and_normalising_rewards_exclude_each_other():
    with pytest.raises(SettingError, match="clip_reward"):
        replace(SETTINGS, clip_reward=True, normalize_reward=True)


@pytest.mark.parametrize("anneal", ["constant", "linear"])
@pytest.mark.parametrize(("actions", "default"), [("discrete", 0.02), ("box", 0.0)])
def test_the_default_entropy_coefficient_is_0_for_continuous_actions(actions, default, anneal):
    """In the loss as in the schedule."""
    by_default, given, other = (
        build(action=SPACES[actions], entropy_coef=coef, anneal_entropy_coef=anneal)
        for coef in (None, default, 0.03)
    )
    for agent in (by_default, given, other):
        learn(agent, env := Episodes(), env.reset(), 1)
    assert by_default.scalars()["train/entropy_coef"] == given.scalars()["train/entropy_coef"]
    learned = [torch.cat([w.flatten() for w in agent.weights().values()])
               for agent in (by_default, given, other)]  # fmt: skip
    assert torch.equal(learned[0], learned[1]) and not torch.equal(learned[0], learned[2])


def test_default_normalisation_depends_on_observations_and_reward_clipping():
    vectors = EnvSpec("Small", 2, (4,), "float32", 1, DiscreteActions(2))
    images = EnvSpec("Images", 2, (1, 84, 84), "uint8", 4, DiscreteActions(2))
    default = replace(SETTINGS, normalize_obs=None, normalize_reward=None)
    assert default.normalizes_obs(vectors) and not default.normalizes_obs(images)
    assert default.normalizes_reward and not replace(default, clip_reward=True).normalizes_reward
    assert not default.normalizes_obs(replace(vectors, one_hot=True))
    default.validate_fit(images, 1000)
    for choice in (True, False):
        settings = replace(SETTINGS, normalize_obs=choice, normalize_reward=choice)
        assert settings.normalizes_obs(vectors) is choice and settings.normalizes_reward is choice
    agent = build(normalize_obs=None, normalize_reward=None)
    assert agent._observations.normaliser is not None
    assert isinstance(agent._rewards, ScaledRewards)
