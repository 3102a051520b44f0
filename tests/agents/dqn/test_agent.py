"""The DQN agent in the loop: counts, schedules, exploration, state, and Q-values in closed form."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from changed import changed

from steadyrl.agents.actors.epsilon_greedy import TIMESTEPS_DRAWN
from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.settings import (
    DistributionSettings,
    DQNSettings,
    DQNTeacherSettings,
    MunchausenSettings,
    NoisySettings,
)
from steadyrl.agents.learner.optimizers.settings import ADAM
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.registry import build_agent
from steadyrl.buffers.replay.settings import ReplaySettings
from steadyrl.core.errors import NonFiniteError, SettingError
from steadyrl.envs.types import DiscreteActions, EnvSpec, Step

CPU = torch.device("cpu")

SETTINGS = DQNSettings(
    name="dqn",
    network=PLAIN,
    hidden=(16,),
    optimizer=ADAM,
    learning_rate=1e-3,
    anneal_learning_rate="linear",
    learning_rate_end=0.0,
    learning_rate_warmup=0.0,
    gamma=0.9,
    batch_size=8,
    max_grad_norm=10.0,
    grad_accumulation=1,
    compile="false",
    replay=ReplaySettings(
        capacity=4096,
        prioritized=False,
        alpha=0.6,
        beta_start=0.4,
        beta_end=1.0,
        anneal_beta="linear",
        beta_warmup=0.0,
        normalize_weights="replay",
        device="cpu",
    ),
    n_step=1,
    double=True,
    dueling=False,
    loss="huber",
    distribution=DistributionSettings(kind="none", atoms=51, v_min=-10.0, v_max=10.0),
    munchausen=MunchausenSettings(enabled=False, alpha=0.9, temperature=0.03, log_policy_min=-1.0),
    noisy=NoisySettings(enabled=False, sigma=0.5, epsilon_greedy=False),
    teacher=DQNTeacherSettings(policy=None, coef=1.0, fraction=0.5, acts=0.0, temperature=1.0),
    clip_reward=False,
    augmentation="none",
    learning_starts=100,
    train_every=4,
    updates_per_train=2,
    target_every=50,
    target_tau=1.0,
    epsilon_start=1.0,
    epsilon_end=0.1,
    epsilon_fraction=0.5,
    anneal_epsilon="linear",
    epsilon_warmup=0.0,
    epsilon_delay=0.0,
)


def build(envs=1, total=1000, obs=4, actions=2, seed=0, **changes):
    replay = {k: changes.pop(k) for k in list(changes) if k in ReplaySettings.__dataclass_fields__}
    settings = changed(SETTINGS, replay=replace(SETTINGS.replay, **replay), **changes)
    spec = EnvSpec("Chain", envs, (obs,), "float32", 1, DiscreteActions(actions))
    return DQN(settings, spec, device=CPU, seed=seed, total_steps=total)


class Chain:
    """Reward 1 a step, episodes of fixed length, the observation is the time as one-hot."""

    def __init__(self, envs, lengths, terminates, seed=0):
        self.lengths, self.terminates = lengths, terminates
        self.random = np.random.default_rng(seed)
        self.at = np.zeros(envs, dtype=int)
        self.over = np.zeros(envs, dtype=bool)
        self.size = max(lengths) + 1
        self.goal = self._draw(envs)

    def _draw(self, n):
        return self.random.choice(self.lengths, size=n)

    def reset(self):
        return self._obs()

    def _obs(self):
        return np.eye(self.size, dtype=np.float32)[self.at]

    def step(self, rewards=None):
        valid = ~self.over
        self.at = np.where(valid, self.at + 1, 0)
        self.goal = np.where(valid, self.goal, self._draw(len(self.at)))
        self.over = valid & (self.at >= self.goal)
        reward = np.where(valid, 1.0 if rewards is None else rewards, 0.0).astype(np.float32)
        none = np.zeros_like(self.over)
        ends = (self.over, none) if self.terminates else (none, self.over)
        return Step(self._obs(), reward, *(e.copy() for e in ends), valid, ())


class Loop(Chain):
    """The observation hides the time left, so that all states have the same value."""

    def _obs(self):
        return np.eye(self.size, dtype=np.float32)[self.at % 10]


def act(agent, obs, *, explore=True):
    """Return a decision of the behaviour actor, or of a greedy one."""
    return agent.actor(len(obs), explore=explore).act(obs, np.zeros(len(obs), dtype=bool))


def run(agent, chain, steps):
    """Drive the agent as the loop does; return the valid steps taken."""
    obs, steps_done = chain.reset(), 0
    while steps_done < steps:
        decision = act(agent, obs)
        agent.update()
        step = chain.step()
        agent.observe(decision, step)
        steps_done += int(step.valid.sum())
        obs = step.obs
    agent.update()
    return steps_done


@pytest.mark.parametrize("envs", [1, 3, 8])
def test_gradient_steps_and_target_updates_are_exact_for_any_number_of_environments(envs):
    agent = build(envs, 2_000, obs=14, hidden=(4,), batch_size=2)
    steps_done = run(agent, Chain(envs, [1, 5, 13], terminates=True), 2_000)
    assert agent.updates == 2 * (steps_done // 4 - 100 // 4)
    assert agent.target_updates == steps_done // 50 - 100 // 50


@pytest.mark.parametrize("envs", [1, 3, 8])
def test_schedules_at_start_middle_and_end(envs):
    agent = build(envs, 1000, obs=11, beta_start=0.4, beta_end=1.0, learning_starts=2000)
    chain = Chain(envs, [10], terminates=False)

    def now():
        schedules = (agent._epsilon, agent._beta, agent._rate)
        return [each.at(agent._clock.steps) for each in schedules]

    assert now() == [1.0, 0.4, 1e-3]
    steps_done = run(agent, chain, 250)
    fraction = steps_done / 1000
    expected = [1 - 0.9 * fraction / 0.5, 0.4 + 0.6 * fraction, 1e-3 * (1 - fraction)]
    assert now() == pytest.approx(expected)
    run(agent, chain, 1000 - steps_done)
    assert now() == [0.1, 1.0, 0.0]


@pytest.mark.parametrize("total", [64, 127])
def test_the_last_update_has_a_positive_learning_rate(total):
    agent = build(1, total, obs=11, learning_starts=0, train_every=total, learning_rate=0.1)
    before = agent.weights()["advantage.weight"].clone()
    run(agent, Chain(1, [10], terminates=False), total)
    assert agent.updates == 2
    moved = (agent.weights()["advantage.weight"] - before).abs().max()
    assert 0.1 < moved < 0.21, "two steps of Adam at the full rate"


@pytest.mark.parametrize("epsilon", [0.2, 0.5])
def test_exploration_is_independent_per_environment(epsilon):
    agent = build(64, obs=4, actions=50, epsilon_start=epsilon, epsilon_end=epsilon)
    obs = np.ones((64, 4), dtype=np.float32)
    greedy = act(agent, obs, explore=False).env_action
    differing = [(act(agent, obs).env_action != greedy).float().mean().item() for _ in range(50)]
    # One random number for all environments would give 0 or 1 each time.
    assert all(0 < fraction < 0.9 for fraction in differing)
    assert np.mean(differing) == pytest.approx(epsilon * 49 / 50, abs=0.03)


@pytest.mark.parametrize("prioritized", [True, False])
def test_importance_weights_use_the_scheduled_beta(prioritized, monkeypatch):
    agent = build(1, 400, obs=11, prioritized=prioritized)
    betas = []
    sample = agent._replay.sample

    def listen(size, *, beta):
        betas.append((beta, agent._beta.at(agent._clock.steps)))
        return sample(size, beta=beta)

    monkeypatch.setattr(agent._replay, "sample", listen)
    run(agent, Chain(1, [10], terminates=False), 400)
    used, due = zip(*betas, strict=True)
    assert used == (due if prioritized else (1.0,) * len(due))
    assert 0.5 < due[0] < 0.6 and due[-1] == 1.0 and len(due) == agent.updates


def test_greedy_actions_change_no_state():
    agent = build(2)
    obs = np.ones((2, 4), dtype=np.float32)
    before = agent.state_dict()
    act(agent, obs, explore=False)
    after = agent.state_dict()
    assert before["actor"] == after["actor"]
    weights = [state["learner"]["network"]["weights"] for state in (before, after)]
    assert torch.equal(*weights)


def test_reset_steps_are_neither_counted_nor_learned_from():
    agent = build(1, obs=3, learning_starts=10_000)
    steps_done = run(agent, Chain(1, [2], terminates=True), 100)
    assert steps_done == 100
    assert len(agent._replay) == 100
    batch = agent._replay.sample(500)
    # Time increases by one in every transition; a reset step would lead from the end to the start.
    assert torch.equal(batch.obs.argmax(1) + 1, batch.next_obs.argmax(1))


def test_rewards_are_clipped_for_learning_only_if_configured():
    for clip, expected in ((True, 1.0), (False, 7.0)):
        agent = build(1, obs=6, clip_reward=clip)
        chain = Chain(1, [5], terminates=True)
        decision = act(agent, chain.reset())
        step = chain.step(rewards=7.0)
        agent.observe(decision, step)
        assert step.reward[0] == 7.0
        assert agent._replay.sample(1).reward.item() == expected


def test_a_non_finite_loss_stops_the_run():
    agent = build(1, obs=6, learning_starts=0, train_every=1)
    chain = Chain(1, [5], terminates=True)
    with pytest.raises(NonFiniteError):
        obs = chain.reset()
        for _ in range(5):
            decision = act(agent, obs)
            agent.observe(decision, step := chain.step(rewards=np.inf))
            agent.update()
            obs = step.obs


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_resuming_is_bitwise_exact(prioritized, accumulate):
    def fresh():
        options = {"prioritized": prioritized, "grad_accumulation": accumulate}
        return build(2, 1000, obs=11, learning_starts=20, n_step=3, dueling=True, **options)

    straight, chain = fresh(), Chain(2, [3, 10], terminates=True)
    run(straight, chain, 300)
    state = straight.state_dict()
    copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
    resumed = fresh()
    resumed.load_state_dict(copied)
    env_copy = Chain(2, [3, 10], terminates=True)
    env_copy.__dict__.update(
        {k: np.copy(v) for k, v in chain.__dict__.items() if k in ("at", "over")}
    )
    env_copy.goal, env_copy.random = chain.goal.copy(), np.random.default_rng()
    env_copy.random.bit_generator.state = chain.random.bit_generator.state
    run(straight, chain, 300)
    run(resumed, env_copy, 300)
    assert straight.updates == resumed.updates
    for name, tensor in straight.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name


def test_a_loaded_actor_saves_the_state_that_it_was_loaded_from():
    agent, other = build(2, 1000, obs=11), build(2, 1000, obs=11)
    run(agent, Chain(2, [3, 10], terminates=True), 2 * TIMESTEPS_DRAWN)  # beyond the first block
    state = agent.state_dict()
    assert state["actor"]["next"] > 0
    other.load_state_dict(state)
    assert other.state_dict()["actor"] == state["actor"]


@pytest.mark.parametrize("microbatches", [2, 3, 100])
@pytest.mark.parametrize("changes", [{}, {"distribution__kind": "c51", "dueling": True}])
def test_microbatches_split_the_same_batch(microbatches, changes):
    """Also with microbatches of different sizes, and more of them than samples."""
    drawn = []
    for count in (1, microbatches):
        agent = build(2, 1000, obs=11, learning_starts=20, grad_accumulation=count, **changes)
        sample, sizes = agent._replay.sample, []
        agent._replay.sample = lambda n, *, beta, sizes=sizes, sample=sample: (
            sizes.append(n) or sample(n, beta=beta)
        )
        learner, cut = agent._learner, []
        loss = learner._loss_spec.loss
        learner.train_step.spec = replace(
            learner._loss_spec,
            loss=lambda *used, loss=loss, cut=cut: cut.append(len(used[2].obs)) or loss(*used),
        )
        run(agent, Chain(2, [3, 10], terminates=True), 60)
        assert set(sizes) == {SETTINGS.batch_size}
        assert sum(cut) == SETTINGS.batch_size * agent.updates
        assert max(cut) == -(-SETTINGS.batch_size // count)
        drawn.append((sizes, agent._learner.network.weights))
    (sizes, whole), (others, pieced) = drawn
    assert sizes == others
    torch.testing.assert_close(whole, pieced, rtol=1e-4, atol=1e-5)


ALL_AT_ONCE = {
    "distribution__kind": "quantile",
    "munchausen__enabled": True,
    "noisy__enabled": True,
    "dueling": True,
}


@pytest.mark.parametrize("microbatches", [2, 3])
@pytest.mark.parametrize("changes", [{}, ALL_AT_ONCE])
def test_microbatches_give_the_batchs_loss_priorities_and_gradient(microbatches, changes):
    found = []
    for count in (1, microbatches):
        options = {"prioritized": True, "n_step": 3, "grad_accumulation": count, **changes}
        agent = build(2, 1000, obs=11, learning_starts=60, train_every=61, **options)
        replay, errors = agent._replay, []
        write = replay.update_priorities
        replay.update_priorities = lambda index, td_error, errors=errors, write=write: (
            errors.append((index.clone(), td_error.clone())) or write(index, td_error)
        )
        metrics, update = [], agent.update
        agent.update = lambda metrics=metrics, update=update: metrics.append(update())
        run(agent, Chain(2, [3, 10], terminates=True), 61)
        assert agent.updates == len(errors) == 2
        means = next(filter(None, metrics))
        found.append((errors, agent._learner.network.gradient, means.values, replay.max_priority))
    (whole, *others), (cut, *theirs) = found
    assert torch.equal(whole[0][0], cut[0][0]), "the same transitions are sampled"
    for (_, errors), (_, parallel_layers) in zip(whole, cut, strict=True):
        torch.testing.assert_close(errors, parallel_layers)
    for one, other in zip(others, theirs, strict=True):
        torch.testing.assert_close(one, other)


def interrupted_in_a_burst():
    """Return an agent that was stopped after 21 of the 40 gradient steps of an interval."""
    agent = build(1, obs=11, learning_starts=0, train_every=50, updates_per_train=40)
    learner = agent._learner
    step = learner.step

    def interrupted(*args):
        found = step(*args)
        if learner.updates == 21:
            learner.stop.request()
        return found

    learner.step = interrupted
    run(agent, Chain(1, [10], True), 50)
    assert agent.updates == 21
    learner.stop.confirmed, learner.step = False, step
    return agent


def test_dropping_the_replay_restarts_pending_learning():
    agent = interrupted_in_a_burst()
    agent.drop_replay()
    run(agent, Chain(1, [10], True), 50)
    assert agent.updates == 21 + 40


def test_updates_that_an_interruption_left_are_done_once_after_resharding():
    agent = interrupted_in_a_burst()
    kept = copy.deepcopy(agent.replay.state_dict())
    agent.reshard(())
    agent.replay.load_state_dict(kept)  # in place of its redistribution
    agent.update()
    assert agent.updates == 40


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize(
    ("starts", "every", "n_step", "reason"),
    [
        (30, 1, 3, "agent.learning_starts=30"),
        (30, 8, 1, "agent.learning_starts=30, train_every=8"),
        (0, 1, 7, "no sample is complete before, unless an episode ends: agent.n_step=7"),
        (9, 4, 20, "no sample is complete before, unless an episode ends: agent.n_step=20"),
    ],
)
def test_the_step_at_which_learning_begins_is_known(envs, starts, every, n_step, reason):
    agent = build(envs, obs=101, learning_starts=starts, train_every=every, n_step=n_step)
    chain, steps = Chain(envs, [100], False), 0
    obs = chain.reset()
    for again in (False, True):
        start, before = agent.learning_start, agent.updates
        while agent.updates == before:
            decision, step = act(agent, obs), chain.step()
            agent.observe(decision, step)
            steps, obs = steps + envs, step.obs
            agent.update()
        assert start.fills == "replay" and (again or start.reason == reason)
        assert start.step <= steps < start.step + envs
        agent.drop_replay()


def test_soft_target_updates_interpolate():
    agent = build(1, obs=11, target_tau=0.25, target_every=1, learning_starts=0, train_every=1000)
    agent._learner.network.weights.fill_(1.0)
    agent._target.weights.fill_(0.0)
    chain = Chain(1, [10], terminates=False)
    run(agent, chain, 2)
    torch.testing.assert_close(agent._target.weights[0].item(), 1 - 0.75**2)


def test_continuous_actions_are_rejected():
    from steadyrl.envs.types import BoxActions

    spec = EnvSpec("Pendulum-v1", 1, (3,), "float32", 1, BoxActions((-2.0,), (2.0,)))
    with pytest.raises(SettingError, match="discrete actions"):
        build_agent(SETTINGS, spec, device=CPU, seed=0, total_steps=10)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("terminates", [False, True])
def test_q_values_bootstrap_at_time_limits(n_step, terminates):
    """γ = .9: truncation bootstraps, so Q = 10 everywhere; termination gives the finite sum."""
    agent = build(
        1,
        4000,
        obs=11,
        actions=2,
        hidden=(32,),
        n_step=n_step,
        learning_rate=3e-3,
        learning_starts=50,
        train_every=1,
        updates_per_train=1,
        target_every=25,
        batch_size=32,
        capacity=1000,
    )
    chain = Chain(1, [10], True) if terminates else Loop(1, [10], False)
    run(agent, chain, 4000)
    q = agent._learner.network.module(torch.eye(11)).detach()
    expected = [10.0] * 10 if not terminates else [(1 - 0.9 ** (10 - t)) / 0.1 for t in range(10)]
    for t, value in enumerate(expected):
        assert q[t].tolist() == pytest.approx([value] * 2, rel=0.02)


@pytest.mark.parametrize("dueling", [False, True])
def test_host_actor_follows_weight_updates(dueling):
    agent = build(64, actions=5, dueling=dueling, hidden=(16, 8))
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    for seed in range(2):
        agent._learner.network.weights.normal_(generator=torch.Generator().manual_seed(seed))
        expected = agent._learner.network.module(torch.from_numpy(obs)).argmax(1)
        assert torch.equal(act(agent, obs, explore=False).env_action, expected)
        assert len(expected.unique()) > 1


@pytest.mark.parametrize(
    ("side", "in_machine_code"), [pytest.param(10, True, marks=pytest.mark.machinery), (36, False)]
)
def test_small_images_act_in_machine_code_as_in_torch(side, in_machine_code):
    spec = EnvSpec("Image", 2, (1, side, side), "uint8", 2, DiscreteActions(3))
    agent = DQN(SETTINGS, spec, device=CPU, seed=0, total_steps=10)
    assert (agent.actor(2, explore=False).on_host is not None) is in_machine_code
    obs = np.random.default_rng(0).integers(0, 255, (2, 2, side, side), dtype=np.uint8)
    expected = agent._learner.network.module(torch.from_numpy(obs)).argmax(1)
    assert torch.equal(act(agent, obs, explore=False).env_action, expected)


def test_the_learning_rate_that_is_logged_is_that_of_the_last_updates(monkeypatch):
    agent = build(total=200, obs=6, anneal_learning_rate="linear", learning_rate_end=0.0)
    rates, step = [], agent._learner.step

    def observed(batch, rate, *scalars):
        rates.append(rate)
        return step(batch, rate, *scalars)

    monkeypatch.setattr(agent._learner, "step", observed)
    assert run(agent, Chain(1, [5], terminates=True), 200) == 200
    assert 0 < rates[-1] == agent.scalars()["train/learning_rate"]


def test_memory_for_networks_and_loss_is_asked_of_their_device(monkeypatch):
    asked = {}

    def require(name, nbytes, *, device):
        asked[name] = nbytes, device

    monkeypatch.setattr("steadyrl.agents.dqn.build.require", require)
    agent = build()
    held = sum(network.weights.nbytes + network.gradient.nbytes for network in (
        agent._learner.network, agent._target
    ))  # fmt: skip
    moments = 2 * agent._learner.network.weights.nbytes
    assert asked["networks"] == (held + moments, CPU)
    assert not agent._target.gradient.numel()  # it does not learn
    assert asked["the loss of agent.distribution.atoms"][1] == CPU
