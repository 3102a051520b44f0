"""Action masks in both algorithms: forbidden actions are never taken, targeted or counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from changed import changed
from ppo_agents import SETTINGS as PPO_SETTINGS

from steadyrl.agents.actors.epsilon_greedy import EpsilonGreedyActor
from steadyrl.agents.actors.greedy import GreedyActor
from steadyrl.agents.dqn.agent import DQN
from steadyrl.agents.dqn.loss import td_loss
from steadyrl.agents.networks.action_mask import UNIFORM_INT_MAX, Masks
from steadyrl.agents.networks.distributions import DiscreteHead
from steadyrl.agents.networks.normalizers import ObservationNormaliser
from steadyrl.agents.networks.q_network import QNetwork
from steadyrl.agents.ppo.agent import PPO
from steadyrl.envs.encoding.masks import read_masks
from steadyrl.envs.types import DiscreteActions, EnvSpec, Step
from tests.agents.dqn.test_loss import batch
from tests.agents.dqn.test_q_heads import (
    SOFT,
    atoms_and_probs,
    head_of,
    log_policy,
    loss_of,
    sample_loss,
)
from tests.agents.engine.test_inductor import SETTINGS as DQN_SETTINGS

CPU = torch.device("cpu")
ACTIONS = 3
SPEC = EnvSpec("Any", 2, (5,), "float32", 1, DiscreteActions(ACTIONS), mask=1)
MASKS = Masks.of(SPEC, CPU)


def with_bits(seen, allowed):
    """Append masks [B, 3] to vectors."""
    bits = (allowed.double() @ torch.tensor([1.0, 2.0, 4.0]).double()).unsqueeze(1)
    return torch.cat((seen, bits.to(seen.dtype)), 1)


def some_masks(rows, seed):
    """Return masks that allow at least one action; often exactly one, or all."""
    numbers = np.random.default_rng(seed).integers(1, 8, rows)
    return torch.tensor([[bool(n >> a & 1) for a in range(ACTIONS)] for n in numbers])


def q_network(seed, shape, masks=MASKS):
    torch.manual_seed(seed)
    return QNetwork((4,), "float32", ACTIONS, (16,), True, shape, masks=masks).double()


def test_masks_are_read_the_same_with_torch_and_without():
    allowed = some_masks(12, 1)
    obs = with_bits(torch.randn(12, 4), allowed)
    assert torch.equal(MASKS.allowed(obs), allowed)
    assert np.array_equal(read_masks(obs.numpy(), SPEC), allowed.numpy())


@pytest.mark.parametrize("double", [False, True])
def test_states_without_allowed_actions_do_not_distort_targets(double):
    """The value `FORBIDDEN` of its actions does not leak into targets."""
    head, plain = head_of("scalar"), batch()
    nothing = torch.zeros(12, ACTIONS, dtype=torch.bool)
    data = plain._replace(
        obs=with_bits(plain.obs, some_masks(12, 1)), next_obs=with_bits(plain.next_obs, nothing)
    )
    online, target = q_network(0, head.shape), q_network(1, head.shape)
    (td_error,) = td_loss(online, target, data, head=head, double=double, masks=MASKS).aux
    assert td_error.abs().max() < 100


@pytest.mark.parametrize("soft", [None, SOFT], ids=["greedy", "munchausen"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["scalar", "c51", "quantile"])
def test_masked_targets_equal_a_loop_over_allowed_actions(kind, double, soft):
    head, plain = head_of(kind), batch()
    now, later = some_masks(12, 1), some_masks(12, 2)
    action = torch.tensor([int(np.flatnonzero(mask)[0]) for mask in now])
    data = plain._replace(
        obs=with_bits(plain.obs, now), next_obs=with_bits(plain.next_obs, later), action=action
    )
    online, target = q_network(0, head.shape), q_network(1, head.shape)
    got = loss_of(soft)(online, target, data, head=head, double=double, masks=MASKS)
    bare = [q_network(seed, head.shape, masks=None) for seed in (0, 1)]
    for i in range(12):
        outputs, before, after, judge = (
            net(obs[i : i + 1])[0].detach().numpy()
            for net, obs in (
                (bare[0], plain.obs),
                (bare[1], plain.obs),
                (bare[1], plain.next_obs),
                (bare[0] if double else bare[1], plain.next_obs),
            )
        )
        may, might = now[i].numpy(), later[i].numpy()
        values = (lambda pair: (pair[0] * pair[1]).sum(1))(atoms_and_probs(kind, judge))[might]
        returns, probs = (part[might] for part in atoms_and_probs(kind, after))
        reward = float(data.reward[i])
        if soft is None:
            best = int(values.argmax())
            targets, frequencies = returns[best], probs[best]
        else:
            own = (lambda pair: (pair[0] * pair[1]).sum(1))(atoms_and_probs(kind, before))[may]
            certain = log_policy(own, soft.temperature)[0]  # the first allowed action
            reward += soft.alpha * min(0.0, max(soft.log_policy_min, certain))
            log_pi = log_policy(values, soft.temperature)
            targets = (returns - log_pi[:, None]).reshape(-1)
            frequencies = (np.exp(log_pi / soft.temperature)[:, None] * probs).reshape(-1)
        targets = reward + float(data.discount[i]) * targets
        loss = sample_loss(kind, outputs[action[i]], targets, frequencies)
        assert got.loss[i].item() == pytest.approx(float(data.weight[i]) * loss, rel=1e-9)
    got.loss.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in online.parameters())


def test_masked_log_prob_and_entropy_equal_the_allowed_actions_only():
    torch.manual_seed(0)
    logits = torch.randn(40, ACTIONS, requires_grad=True)
    allowed, head = some_masks(40, 3), DiscreteHead(ACTIONS)
    obs = with_bits(torch.zeros(40, 4), allowed)
    action = torch.tensor([int(np.flatnonzero(mask)[-1]) for mask in allowed])
    log_prob, entropy = head.evaluate(MASKS.forbid(logits, obs), action)
    for i, mask in enumerate(allowed):
        log_p = logits[i, mask].detach().double().log_softmax(0)
        assert log_prob[i].item() == pytest.approx(log_p[-1].item(), abs=1e-6)
        assert entropy[i].item() == pytest.approx(-(log_p.exp() * log_p).sum().item(), abs=1e-6)
    single = allowed.sum(1) == 1
    assert single.any() and (entropy[single] == 0).all()
    (log_prob.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all() and (logits.grad[~allowed] == 0).all()


def test_empty_masks_give_finite_losses():
    """Padding has all-zero masks and weight 0, which has no effect if losses are finite."""
    head = DiscreteHead(ACTIONS)
    parameters = MASKS.forbid(torch.randn(2, ACTIONS), torch.zeros(2, 5))
    numbers = head.evaluate(parameters, torch.tensor([0, 2]))
    assert all(number.isfinite().all() for number in numbers)


def test_exploration_is_uniform_over_allowed_actions():
    allowed = torch.tensor([[True, False, True], [False, True, False]]).repeat(2000, 1)
    obs = with_bits(torch.zeros(4000, 4), allowed).numpy()
    best = GreedyActor(lambda obs: torch.zeros(len(obs), 3), None, CPU, lambda q: q.argmax(1))
    actor = EpsilonGreedyActor(best, SPEC, epsilon=lambda: 1.0, seed=0)
    action = actor.act(obs, np.zeros(4000, bool)).env_action
    assert (action[1::2] == 1).all()
    frequencies = torch.bincount(action[::2], minlength=3) / 2000
    assert frequencies[1] == 0 and frequencies[0].item() == pytest.approx(0.5, abs=0.04)
    assert (
        UNIFORM_INT_MAX % 200 < 1e-9 * UNIFORM_INT_MAX
    )  # divisible by any number of actions, nearly exactly


class Rows:
    """Random observations with masks, also with stacked frames."""

    def __init__(self, spec, seed=0):
        self.spec, self.random = spec, np.random.default_rng(seed)

    def row(self):
        n, frames, actions = self.spec.num_envs, self.spec.frame_stack, self.spec.action.n
        shape = (n, frames, *self.spec.frame_shape)
        bits = self.random.integers(1, 1 << actions, (n, frames))
        if self.spec.dtype == "uint8":
            obs = self.random.integers(0, 256, shape, dtype=np.uint8)
            obs[:, :, :, -1] = 0
            obs[:, :, 0, -1, 0] = bits
        else:
            obs = self.random.normal(size=shape).astype(np.float32)
            obs[..., -1] = bits
        return obs.reshape(n, *self.spec.observation_shape), bits[:, -1]


VECTORS = EnvSpec("Any", 2, (5,), "float32", 2, DiscreteActions(7), mask=1)
IMAGES = EnvSpec("Any", 2, (1, 11, 10), "uint8", 2, DiscreteActions(7), mask=1)
AGENTS = {
    "dqn": (DQN, DQN_SETTINGS, {}),
    "dueling": (DQN, DQN_SETTINGS, {"dueling": True}),
    "noisy": (DQN, DQN_SETTINGS, {"noisy__enabled": True, "dueling": True}),
    "c51": (DQN, DQN_SETTINGS, {"distribution__kind": "c51"}),
    "ppo": (PPO, PPO_SETTINGS, {}),
    "one trunk": (PPO, PPO_SETTINGS, {"shared_trunk": True}),
    "recurrent": (PPO, PPO_SETTINGS, {"recurrent__cell": "gru", "recurrent__size": 8}),
    "normalised": (PPO, PPO_SETTINGS, {"normalize_obs": True}),
}


@pytest.mark.parametrize("spec", [VECTORS, IMAGES], ids=["vectors", "images"])
@pytest.mark.parametrize("name", AGENTS)
def test_forbidden_actions_are_never_taken(name, spec):
    cls, settings, changes = AGENTS[name]
    if name == "normalised" and spec is IMAGES:
        changes = {"clip_value": True}
    settings = changed(settings, **changes)
    agent = cls(settings, spec, device=CPU, seed=0, total_steps=10_000)
    rows, episode_starts = Rows(spec), np.ones(2, bool)
    with torch.no_grad():  # make outputs of actions differ strongly
        agent._learner.network.weights.normal_(std=3.0)
    actors = [agent.actor(2, explore=True), agent.actor(2, explore=False)]
    for _ in range(50):
        obs, bits = rows.row()
        for actor in actors:
            action = actor.act(obs, episode_starts).env_action.numpy()
            assert (bits >> action & 1).all()
    finished = [
        cls.policy(settings, spec, CPU),
        cls.sampling_policy(settings, spec, CPU, num_envs=2, seed=0),
    ]
    for network, _ in finished:
        network.load_state_dict(agent.weights())
    for _ in range(20):
        obs, bits = rows.row()
        actions = [actor.act(obs, episode_starts).env_action for _, actor in finished]
        assert all((bits >> action.numpy() & 1).all() for action in actions)
        assert torch.equal(actions[0], actors[1].act(obs, episode_starts).env_action)


def test_the_normaliser_ignores_masks():
    spec = replace(VECTORS, frame_stack=2)
    plain, other = ObservationNormaliser((8,)), ObservationNormaliser((8,), Masks.of(spec, CPU))
    rows = Rows(spec)
    for _ in range(20):
        obs = torch.from_numpy(rows.row()[0])
        seen = Masks.of(spec, CPU).features(obs)
        plain.update(seen)
        other.update(obs)
        normal = other(obs)
        assert torch.equal(Masks.of(spec, CPU).features(normal), plain(seen))
        assert torch.equal(Masks.of(spec, CPU).allowed(normal), Masks.of(spec, CPU).allowed(obs))
    assert {k: v.tolist() for k, v in plain.named_buffers()} == {
        k: v.tolist() for k, v in other.named_buffers()
    }


def test_masks_of_empty_batches():
    masks, none = Masks.of(replace(VECTORS, frame_stack=2), CPU), torch.zeros(0, 10)
    assert masks.features(none).shape == (0, 8)
    assert masks.replace_features(masks.features(none), none).shape == none.shape
    assert masks.allowed(none).shape == (0, 7)


def learned(cls, settings, spec):
    """Return the weights after some updates on random steps, with occasional episode ends."""
    agent = cls(settings, spec, device=CPU, seed=0, total_steps=1_000)
    rows, random = Rows(spec), np.random.default_rng(1)
    (obs, _), over, updates = rows.row(), np.zeros(2, bool), 0
    while agent.updates < 24:
        decision = agent.actor(2, explore=True).act(obs, over)
        valid, ends = ~over, random.random((2, 2)) < 0.1
        terminated, truncated = ends & valid
        obs, _ = rows.row()
        reward = random.normal(size=2).astype(np.float32) * valid
        agent.observe(decision, Step(obs, reward, terminated, truncated, valid, ()))
        over, updates = terminated | truncated, updates + (agent.update() is not None)
    return agent._learner.network.weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "c51", "ppo", "recurrent", "normalised"])
def test_compiled_updates_agree_with_eager_ones(name, caplog):
    cls, settings, changes = AGENTS[name]
    often = {"learning_starts": 20, "train_every": 4} if cls is DQN else {}
    settings = changed(settings, **changes, **often)
    eager, graph = (learned(cls, replace(settings, compile=c), VECTORS) for c in ("false", "true"))
    torch.testing.assert_close(eager, graph, rtol=1e-4, atol=1e-5)
    assert eager.isfinite().all() and "running eagerly" not in caplog.text
