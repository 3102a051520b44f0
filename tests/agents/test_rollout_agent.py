"""Agents of rollouts need a loss and targets: PQN (Gallici et al. 2025) on the shared part."""

import copy

import numpy as np
import pytest
import torch
from ppo_agents import CPU, Episodes

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.actors.greedy import greedy_q_actor
from steadyrl.agents.engine.choice import engine_of
from steadyrl.agents.learner.flat import FlatNetwork
from steadyrl.agents.learner.learner import Learner
from steadyrl.agents.learner.loss_spec import LossSpec, PerSampleLoss
from steadyrl.agents.learner.schedules import over_the_run
from steadyrl.agents.networks.action_mask import Masks
from steadyrl.agents.networks.init import initialise, on_meta
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.rollout_agent import (
    RolloutAgent,
    RolloutClock,
    RolloutParts,
    Targets,
    shuffled_minibatches,
)
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.envs.types import DiscreteActions, EnvSpec

T, N, TOTAL = 8, 3, 10 * 8 * 3
SPEC = EnvSpec("Synthetic", N, (4,), "float32", 1, DiscreteActions(3))
MASKED = EnvSpec("Masked", N, (5,), "float32", 1, DiscreteActions(3), mask=1)


def pqn_loss(network, batch):
    """Return ½(Q(s, a) − R_λ)² of each sample."""
    q = network(batch.obs).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    return PerSampleLoss(0.5 * (q - batch.return_).square())


class LambdaReturns(Targets):
    """λ-returns of Q-learning: GAE with max Q as values, computed `batch_size` at a time."""

    def __init__(self, learner, masks, *, gamma, q_lambda, batch_size):
        self.learner, self.masks, self.batch_size = learner, masks, batch_size
        self.discounts = {"gamma": gamma, "gae_lambda": q_lambda}

    def __call__(self, rollout, next_obs):
        with torch.inference_mode():
            values = rollout.value[:-1].view(-1).split(self.batch_size)
            batches = rollout.obs.flatten(0, 1).split(self.batch_size)
            for value, obs in zip(values, batches, strict=True):
                value.copy_(self.max_q(obs))
            last = self.max_q(next_obs)
        rollout.compute_advantages(last, **self.discounts)

    def max_q(self, obs):
        """Return max Q [B] over the allowed actions; any Q where none is allowed."""
        q = self.learner.forward(obs)
        allowed = q if self.masks is None else self.masks.forbid(q, obs)
        return q.gather(1, allowed.argmax(1, keepdim=True)).squeeze(1)


class PQN(RolloutAgent):
    """Q-learning from rollouts, without replay and target network."""

    def __init__(self, spec=SPEC, seed=0):
        masks, actions = Masks.of(spec, CPU), spec.action.n
        with on_meta():
            shape = spec.unmasked_shape, spec.dtype
            network = QNetwork(*shape, actions, (16,), False, network=PLAIN, masks=masks)
        initialise(network, seed)
        loss_spec = LossSpec(loss=pqn_loss, metrics=(), max_grad_norm=10.0, grad_accumulation=1)
        learner = Learner(loss_spec, FlatNetwork(network, CPU), "direct")
        greedy = greedy_q_actor(network, CPU, engine_of("direct"))
        rate = over_the_run("linear", 1e-2, 0.0, 0.0, TOTAL)
        super().__init__(
            RolloutParts(
                clock=RolloutClock(T * N, rate=rate),
                learner=learner,
                rollout=RolloutBuffer(
                    steps=T,
                    num_envs=N,
                    observation_shape=spec.observation_shape,
                    observation_dtype=torch.float32,
                    action_shape=(),
                    action_dtype=torch.int64,
                    device=CPU,
                ),
                targets=LambdaReturns(learner, masks, gamma=0.9, q_lambda=0.65, batch_size=10),
                minibatches=shuffled_minibatches(learner, epochs=2, count=3),
                shuffling=torch.Generator().manual_seed(seed),
                actor=EpsilonGreedyActor(greedy, spec, epsilon=lambda: 0.3, seed=seed),
                build_greedy=lambda: greedy,
            )
        )

    @classmethod
    def policy(cls, settings, spec, device):
        """Build no finished policy: these tests need none."""
        raise NotImplementedError


def play(agent, env, obs, timesteps):
    """Act, observe and update; return the last observations."""
    for _ in range(timesteps):
        decision = agent.actor(N, explore=True).act(obs, np.zeros(N, bool))
        step = env.step()
        agent.observe(decision, step)
        agent.update()
        obs = step.obs
    return obs


def without_resets(env):
    """Episodes that never end: every timestep counts N steps."""
    env.end = 0.0
    return env


def test_every_update_uses_the_learning_rate_as_its_rollout_began():
    agent, env, rates = PQN(), without_resets(Episodes(N)), []
    step = agent._learner.step
    agent._learner.step = lambda batch, rate: (rates.append(rate), step(batch, rate))
    play(agent, env, env.reset(), 10 * T)
    assert rates == pytest.approx([1e-2 * (1 - k / 10) for k in range(10) for _ in range(6)])


class MaskedEpisodes(Episodes):
    """The last element of an observation is its action mask; at least one action is allowed."""

    def reset(self):
        obs = super().reset()
        obs[:, -1] = self.random.integers(1, 8, size=len(obs))
        return obs


@pytest.mark.parametrize("masked", [False, True])
def test_lambda_returns_bootstrap_from_the_best_allowed_action(masked):
    agent = PQN(MASKED if masked else SPEC)
    env = MaskedEpisodes(N, (5,)) if masked else Episodes(N)
    network, obs, seen, steps = agent._learner.network.module, env.reset(), [], []
    for _ in range(T):
        seen.append(obs)
        decision = agent.actor(N, explore=True).act(obs, np.zeros(N, bool))
        if masked:
            allowed = obs[:, -1].astype(int) >> np.asarray(decision.env_action) & 1
            assert allowed.all()
        steps.append(env.step())
        agent.observe(decision, steps[-1])
        obs = steps[-1].obs
    agent._compute_targets()

    def max_q(obs):
        with torch.no_grad():
            q = network(torch.from_numpy(obs)).double().numpy()
        if masked:
            q[obs[:, -1:].astype(int) >> np.arange(3) & 1 == 0] = -np.inf
        return q.max(1)

    best = [max_q(obs) for obs in (*seen[1:], obs)]
    later = best[-1]
    for t in reversed(range(T)):
        step, ends = steps[t], steps[t].terminated | steps[t].truncated
        later = np.where(ends | (t == T - 1), best[t], 0.35 * best[t] + 0.65 * later)
        later = step.reward + 0.9 * np.where(step.terminated, 0.0, later)
        found = agent._rollout.return_[t].numpy()
        np.testing.assert_allclose(found[step.valid], later[step.valid], rtol=1e-5, atol=1e-5)


def test_a_restored_agent_continues_bitwise_within_a_rollout():
    one, other, env = PQN(), PQN(seed=1), Episodes(N)
    obs = play(one, env, env.reset(), 2 * T + 3)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for agent, world in ((one, env), (other, copy.deepcopy(env))):
        play(agent, world, obs, 2 * T)
    assert one.updates == other.updates == 4 * 6
    assert torch.equal(one._learner.network.weights, other._learner.network.weights)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("action", [-1, 3])
def test_a_saved_rollout_holds_no_action_that_there_is_not(masked, action):
    spec = MASKED if masked else SPEC
    env = MaskedEpisodes(N, (5,)) if masked else Episodes(N)
    agent, other = PQN(spec), PQN(spec, seed=1)
    play(agent, env, env.reset(), T + 3)
    state = copy.deepcopy(agent.state_dict())
    now = agent._clock.steps, None, agent._next_obs
    other.load_state_dict(state)
    other.check_consistency(*now)
    state["rollout"]["action"][1, 2] = action
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=rf"holds {action} at \[1, 2\], each can be 0 to 2"):
        other.check_consistency(*now)


@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupted_update_is_due_again_from_the_same_state(after):
    agent, env = PQN(), Episodes(N)
    obs = play(agent, env, env.reset(), 2 * T - 1)
    decision = agent.actor(N, explore=True).act(obs, np.zeros(N, bool))
    agent.observe(decision, env.step())
    whole, step, calls = PQN(seed=1), agent._learner.step, []
    whole.load_state_dict(copy.deepcopy(agent.state_dict()))

    def counted(*arguments):
        step(*arguments)
        calls.append(None)
        if len(calls) == after:
            agent.stop.request()

    before = agent._learner.network.weights.clone()
    agent._learner.step = counted
    assert agent.update() is None and len(calls) == after
    assert torch.equal(agent._learner.network.weights, before) and agent.updates == 6
    del agent._learner.step
    agent.stop.local = agent.stop.confirmed = False
    assert agent.update() is not None and whole.update() is not None
    assert torch.equal(agent._learner.network.weights, whole._learner.network.weights)


def test_resharding_drops_the_partial_rollout_and_begins_another():
    agent, env = PQN(), Episodes(N)
    play(agent, env, env.reset(), T + 3)
    steps = agent._clock.steps
    agent.reshard(())
    assert agent._rollout.position == 0 and agent._clock.steps == steps
    agent.check_consistency(steps, None, agent._next_obs)
    with pytest.raises(ValueError, match=r"agent\.steps: is"):
        agent.check_consistency(steps + 1, None, agent._next_obs)
