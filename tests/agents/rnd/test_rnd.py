"""RND: intrinsic rewards and returns against loops over valid steps, for every kind of PPO."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from changed import changed
from forked_ranks import together
from ppo_agents import CPU, SETTINGS, SPACES, Episodes, act, build, collect, extension, learn
from torch import nn

from steadyrl.agents.distillation.teacher import ObjectTeacher
from steadyrl.agents.learner.reward_normaliser import RewardNormaliser
from steadyrl.agents.networks.settings import PLAIN
from steadyrl.agents.registry import build_agent
from steadyrl.agents.rnd.rnd import (
    CLIP,
    ERROR_DECAY,
    RNDBatch,
    RNDNetwork,
    non_episodic_gae,
    reset_parameters,
    rnd_loss,
)
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import EnvSpec
from tests.agents.learner.test_learner import as_traced
from tests.agents.ppo.test_ranks import ENVS, one_rank, random_timesteps, snapshots

ON = {"rnd__coef": 0.5, "rnd__gamma": 0.8}
STEPS = SETTINGS.rollout_steps


def test_intrinsic_returns_must_end_by_their_discount():
    with pytest.raises(SettingError, match="gamma"):
        build(rnd__coef=0.5, rnd__gamma=1.0)


def dense(parameters, x):
    """Apply layers of (weight, bias) with ReLUs between them to one sample, in plain Python."""
    layers = [
        (w.tolist(), b.tolist()) for w, b in zip(parameters[::2], parameters[1::2], strict=True)
    ]
    for k, (weight, bias) in enumerate(layers):
        x = [
            sum(a * b for a, b in zip(t, x, strict=True)) + c
            for t, c in zip(weight, bias, strict=True)
        ]
        if k < len(layers) - 1:
            x = [max(0.0, y) for y in x]
    return x


class NaiveRND:
    """RND as loops over plain numbers, with the current weights."""

    def __init__(self, agent):
        module, target = (
            extension(agent)._rnd.learner.network.module,
            extension(agent)._rnd._target.module,
        )
        self.predictor, self.value, self.target = (
            list(net.parameters()) for net in (module.predictor, module.value, target)
        )

    def scale_by(self, seen):
        """Set the scale of observations from all valid timesteps so far."""
        columns = list(zip(*seen, strict=True))
        self.mean = [sum(column) / len(column) for column in columns]
        squares = [
            sum((x - m) ** 2 for x in c) / len(c) for c, m in zip(columns, self.mean, strict=True)
        ]
        self.std = [math.sqrt(square) for square in squares]

    def normal(self, obs):
        scaled = ((x - m) / s for x, m, s in zip(obs, self.mean, self.std, strict=True))
        return [min(CLIP, max(-CLIP, x)) for x in scaled]

    def error(self, obs):
        x = self.normal(obs)
        one, other = dense(self.predictor, x), dense(self.target, x)
        return sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / len(one)

    def worth(self, obs):
        return dense(self.value, self.normal(obs))[0]


def deviation(numbers, weights):
    mean = sum(x * w for x, w in zip(numbers, weights, strict=True)) / sum(weights)
    squares = ((x - mean) ** 2 * w for x, w in zip(numbers, weights, strict=True))
    return math.sqrt(sum(squares) / sum(weights))


def recorded(agent, env, obs):
    """Collect a rollout; return observations [T + 1, N], flags and the last observations."""
    seen, flags = [obs], []
    for _ in range(STEPS):
        decision, step = act(agent, obs), env.step()
        agent.observe(decision, step)
        obs = step.obs
        seen.append(obs)
        flags.append(step.valid)
    return np.array(seen), np.array(flags), obs


def valid_rows(seen, valid):
    return [seen[t, env].tolist() for t, env in zip(*np.nonzero(valid), strict=True)]


@pytest.mark.parametrize("normalize", [False, True])
def test_intrinsic_advantages_and_returns_equal_loops_over_valid_steps(normalize):
    agent, plain = (build(normalize_obs=normalize, **switch) for switch in (ON, {}))
    env = Episodes(scale=3.0)
    seen, valid, obs = recorded(agent, env, env.reset())
    before = extension(agent)._rnd.learner.network.weights.clone()
    agent.update()
    assert torch.equal(before, extension(agent)._rnd.learner.network.weights), "it has no scale yet"
    history = valid_rows(seen, valid)
    totals, weights, returns = [], [], [0.0] * 3
    for _ in range(2):
        naive = NaiveRND(agent)
        naive.scale_by(history)
        seen, valid, obs = recorded(agent, env, obs)
        plain.load_state_dict({k: agent.state_dict()[k] for k in plain.state_dict()})
        for one in (agent, plain):
            one._compute_targets()
        error = [[naive.error(raw) for raw in rows] for rows in seen]
        worth = [[naive.worth(raw) for raw in rows] for rows in seen]
        for t in range(STEPS):
            for n in range(3):
                if valid[t, n]:
                    returns[n] = returns[n] * ON["rnd__gamma"] + error[t + 1][n]
                    totals.append(returns[n])
                    weights.append(1.0)
        std = deviation(totals, weights)
        weights = [weight * ERROR_DECAY for weight in weights]
        novel = (agent._rollout.advantage - plain._rollout.advantage) / extension(agent).rnd_coef
        for n in range(3):
            valid_steps = [t for t in range(STEPS) if valid[t, n]]
            following = 0.0
            for t, later in zip(
                reversed(valid_steps), reversed([*valid_steps[1:], STEPS]), strict=True
            ):
                delta = error[t + 1][n] / std + 0.8 * worth[later][n] - worth[t][n]
                following = delta + 0.8 * SETTINGS.gae_lambda * following
                assert novel[t, n].item() == pytest.approx(following, rel=1e-3, abs=1e-3)
                batch = extension(agent)._rnd._batch(agent._rollout, torch.tensor([t * 3 + n]))
                assert batch.return_.item() == pytest.approx(following + worth[t][n], rel=1e-3)
                for got, raw in ((batch.obs, seen[t, n]), (batch.next_obs, seen[t + 1, n])):
                    assert got[0].tolist() == pytest.approx(naive.normal(raw), rel=1e-3, abs=1e-4)
                loss = rnd_loss(extension(agent)._rnd.learner.network.module, batch).loss.item()
                squares = (following) ** 2
                assert loss == pytest.approx(error[t + 1][n] + squares, rel=1e-3, abs=1e-3)
        assert not novel[torch.from_numpy(~valid)].any(), "reset timesteps have no advantage"
        assert (~valid).sum() > 3
        agent._compute_targets = lambda: None  # done above
        agent._learn()
        del agent._compute_targets
        agent._rollout.clear()
        agent._clock.begin_rollout()
        history += valid_rows(seen, valid)
        assert extension(agent)._rnd._statistics.count.item() == len(history)


def test_non_episodic_gae_continues_through_ends_and_skips_resets():
    reward, value = (np.random.default_rng(k).random((5, 1)).astype(np.float32) for k in (0, 1))
    valid = np.array([[True], [True], [False], [True]])
    found, short = np.zeros((4, 1), np.float32), np.zeros((3, 1), np.float32)
    non_episodic_gae(reward[:4], value, valid, 0.9, 0.8, found)
    valid_ = valid[:, 0]
    rows = np.append(valid_, True)
    non_episodic_gae(reward[:4][valid_], value[rows], np.ones((3, 1), bool), 0.9, 0.8, short)
    assert found[valid_].tolist() == short.tolist() and found[2] == 0
    none = np.zeros((4, 1), np.float32)
    non_episodic_gae(reward[:4], value, np.zeros_like(valid), 0.9, 0.8, none)
    assert not none.any()


def test_each_valid_sample_is_used_once_per_epoch():
    agent, env = build(**ON), Episodes(mean_length=3)
    _, obs = learn(agent, env, env.reset(), 1)
    _, valid, _ = recorded(agent, env, obs)
    agent._compute_targets()
    parts = extension(agent)._rnd._minibatches(agent._rollout, agent._shuffling)
    rows = sorted(torch.cat([rows for rows, _ in parts]).tolist())
    assert rows == np.flatnonzero(valid).tolist() and len(rows) < valid.size


def test_intrinsic_rewards_ignore_how_episodes_end():
    """Truncated or terminated: equal intrinsic rewards, independent of extrinsic ones."""
    found = []
    for kind in ("terminated", "truncated"):
        agent, env = build(**ON), Episodes(mean_length=3)
        obs = env.reset()
        for t in range(2 * STEPS):
            decision, step = act(agent, obs), env.step()
            both, none = step.terminated | step.truncated, np.zeros(3, bool)
            ends = (both, none) if kind == "terminated" else (none, both)
            # The first rollout only initialises statistics.
            step = step._replace(terminated=ends[0], truncated=ends[1])
            agent.observe(decision, step)
            obs = step.obs
            if t == STEPS - 1:
                agent._compute_targets()
                extension(agent)._rnd.update_statistics(agent._rollout, None)
                agent._rollout.clear()
        agent._compute_targets()
        found.append(extension(agent)._rnd._outputs)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_non_episodic_rewards_are_scaled_by_the_std_of_their_returns():
    normaliser = RewardNormaliser(1, 0.5, episodic=False)
    valid = np.array([[True], [False], [True], [True]])
    normaliser.add(np.array([[4.0], [99.0], [2.0], [0.0]], np.float32), valid)
    returns = [4.0, 4.0, 2.0]
    assert normaliser.scale == pytest.approx(1 / np.std(returns))


def test_prediction_error_falls_where_visited_only():
    """Half of the space is visited: its prediction error falls, the other half's far less."""
    agent = build(4, shape=(2,), learning_rate=3e-3, epochs=4, **ON)
    env = Episodes(4, (2,), mean_length=10)
    half = env.reset
    env.reset = lambda: np.abs(half()) * [1, -1]
    env.reset = (lambda plain: lambda: plain().astype(np.float32))(env.reset)
    found, _ = learn(agent, env, env.reset(), 30)
    errors = [metrics["train/rnd_loss"] for metrics in found[1:]]
    assert "train/rnd_loss" not in found[0] and errors[-1] < errors[0] / 10
    rnd = extension(agent)._rnd
    points = torch.from_numpy(env.reset())
    new = {}
    for name, seen in (("there", points), ("elsewhere", -points)):
        normal = rnd._statistics(seen)
        predicted = rnd._module(normal, normal)[1]
        new[name] = (predicted - rnd._target.module(normal)).square().mean().item()
    assert new["elsewhere"] > 5 * new["there"]


SWITCHES = {
    "alone": {},
    "scaled": {"normalize_obs": True, "normalize_reward": True, "popart": True},
    "remembering": {"recurrent__cell": "gru", "normalize_obs": True},
    "stopped early with microbatches": {
        "target_kl": 1e-4,
        "grad_accumulation": 2,
        "batch_size": 10,
    },
    "pixels": {"shape": (2, 6, 6), "dtype": "uint8"},
    "masked": {"shape": (5,), "mask": 1},
}


class Worlds(Episodes):
    """Random observations: pixels, or vectors with action masks."""

    def __init__(self, dtype="float32", mask=0, **rest):
        super().__init__(**rest)
        self.dtype, self.mask = dtype, mask

    def reset(self):
        obs = super().reset()
        if self.dtype == "uint8":
            return (np.abs(obs) * 80).astype(np.uint8)
        if self.mask:
            obs[..., -1] = self.random.integers(1, 8, len(obs))
        return obs


def agent_and_world(switches, seed=0):
    agent = build(seed=seed, **ON, **switches)
    kinds = {key: switches[key] for key in ("shape", "dtype", "mask") if key in switches}
    return agent, Worlds(**kinds)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_a_restored_agent_continues_bitwise(switches):
    (one, env), (other, _) = (agent_and_world(switches, seed) for seed in (1, 2))
    _, obs = learn(one, env, env.reset(), 2)
    obs = collect(one, env, obs, 5)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    naive = copy.deepcopy(env)
    for agent, world in ((one, env), (other, naive)):
        collect(agent, world, obs, 11)
        agent.update()
        assert extension(agent)._rnd._has_statistics
    for part_of in (lambda a: a._learner.network, lambda a: extension(a)._rnd.learner.network):
        named = part_of(other).named()
        for name, tensor in part_of(one).named().items():
            assert torch.equal(tensor, named[name]), name
    assert (
        extension(one)._intrinsic_rewards.state_dict()["count"]
        == extension(other)._intrinsic_rewards.state_dict()["count"]
        > 0
    )


@pytest.mark.parametrize("after", [1, 9])
def test_an_interrupted_update_is_rolled_back(after):
    """Interrupted in the policy's steps, or in RND's steps after them."""
    agent, env = build(normalize_obs=True, **ON), Episodes(scale=9.0)
    _, obs = learn(agent, env, env.reset(), 2)
    collect(agent, env, obs, STEPS)
    agent.set_stop_flag(stop := agent.stop)
    before = copy.deepcopy(agent.state_dict())
    calls = []
    for learner in (agent._learner, extension(agent)._rnd.learner):

        def counted(*args, step=learner.step):
            step(*args)
            calls.append(None)
            if len(calls) == after:
                stop.request()

        learner.step = counted
    assert agent.update() is None and len(calls) == after
    now = agent.state_dict()
    for name in ("value", "log_prob"):  # these are recomputed for this rollout
        assert now["rollout"].pop(name).shape == before["rollout"].pop(name).shape
    torch.testing.assert_close(now, before, rtol=0, atol=0)


@pytest.mark.long
def test_compiled_updates_learn_the_same():
    weights = []
    for graph in (False, True):
        agent = build(minibatches=3, compile=str(graph).lower(), **ON)
        if graph:
            as_traced(agent._learner)
            as_traced(extension(agent)._rnd.learner)
        env = Episodes(scale=9.0)
        learn(agent, env, env.reset(), 3)
        weights.append(
            [agent._learner.network.weights, extension(agent)._rnd.learner.network.weights]
        )
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-4)


def test_rnd_works_with_a_teacher():
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    teacher = ObjectTeacher("t", spec.action, lambda obs: (obs[:, 0] > 0).astype(np.int64))
    settings = changed(SETTINGS, teacher__policy="t", teacher__acts=0.5, **ON)
    agent = build_agent(settings, spec, device=CPU, seed=0, total_steps=2000, teacher=teacher)
    assert [type(each).__name__ for each in agent._extensions] == ["PPOTeacher", "PPORND"]
    env = Episodes()
    found, _ = learn(agent, env, env.reset(), 3)
    assert {"train/teacher_loss", "train/rnd_loss", "train/rnd_value_loss"} <= found[-1].keys()
    assert {"teacher_guide", "rnd", "intrinsic_rewards"} <= agent.state_dict().keys()
    agent.load_state_dict(agent.state_dict())


def snapshot(agent, metrics):
    rnd = extension(agent)._rnd
    return {
        "weights": rnd.learner.network.weights.detach().numpy().copy(),
        "target": rnd._target.weights.detach().numpy().copy(),
        "mean": rnd._statistics.mean.numpy().copy(),
        "square": rnd._statistics.square.numpy().copy(),
        "scale": rnd.rewards.scale,
        "policy": agent._learner.network.weights.detach().numpy().copy(),
    }


@pytest.mark.parametrize("normalize", [False, True])
def test_rnd_on_ranks_equals_one_process(normalize):
    changes = {"minibatches": 1, "normalize_obs": normalize, "epochs": 3, **ON}
    timesteps = random_timesteps(2, 3)
    single = build(2 * ENVS, **changes)
    truth = snapshots(single, timesteps, 0, 2 * ENVS, lambda agent, step: None, snapshot)
    for rank in together(2, one_rank, timesteps, changes, snapshot):
        for theirs, ours in zip(rank, truth, strict=True):
            for name, value in ours.items():
                np.testing.assert_allclose(theirs[name], value, rtol=1e-3, atol=2e-5, err_msg=name)


def test_the_gradient_equals_finite_differences():
    torch.manual_seed(0)
    net = RNDNetwork((3,), (5,), PLAIN).double()
    x, y = (torch.randn(4, 3, dtype=torch.float64) for _ in range(2))
    batch = RNDBatch(x, y, torch.randn(4, 5).double(), torch.randn(4).double())
    names = [name for name, _ in net.named_parameters()]

    def loss(*weights):
        given = dict(zip(names, weights, strict=True))
        return rnd_loss(lambda *o: torch.func.functional_call(net, given, o), batch).loss

    weights = [p.detach().clone().requires_grad_() for p in net.parameters()]
    assert torch.autograd.gradcheck(loss, weights)


def test_rnd_is_skipped_once_its_coefficient_is_zero():
    agent, env = build(total=200, **ON, rnd__fraction=0.5), Episodes()
    found, _ = learn(agent, env, env.reset(), 4)
    assert ["train/rnd_loss" in metrics for metrics in found] == [False, True, True, False]
    assert agent.scalars()["train/rnd_coef"] == 0 and extension(agent)._intrinsic_rewards._count > 0


def test_metrics_of_rnd_count_its_own_steps():
    """The KL limit ends the policy's epochs, not RND's; the explained variance is the rollout's."""
    agent, env = build(rnd__coef=1.0, target_kl=1e-9, learning_rate=0.1, epochs=10), Episodes()
    learn(agent, env, env.reset(), 1)  # RND is idle in the first
    collect(agent, env, env.reset(), 16)
    before, metrics = agent.updates, agent.update()
    counts = dict(zip(metrics.names, metrics.counts, strict=True))
    assert agent.updates - before == counts["train/loss"] == counts["train/loss_max"] == 1
    assert counts["train/rnd_loss"] == counts["train/rnd_value_loss"] == 4
    assert counts["train/explained_variance"] == 1


def test_without_rnd_plain_ppo_is_built():
    agent = build()
    assert type(agent).__name__ == "PPO" and agent._extensions == ()


def test_layers_begin_twice_as_wide_and_layer_norms_as_they_are():
    networks = [RNDNetwork((4,), (8,), replace(PLAIN, layer_norm=norm)) for norm in (False, True)]
    for network in networks:
        reset_parameters(network, torch.Generator().manual_seed(0))
    gains = [m.weight for m in networks[1].modules() if isinstance(m, nn.LayerNorm)]
    assert gains and all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)
    for network in networks:
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                limit = 2 / layer.in_features**0.5
                assert 0.5 * limit < layer.weight.abs().max() <= limit
