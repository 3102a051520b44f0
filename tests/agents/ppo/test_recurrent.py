"""Recurrent PPO against loops over single timesteps, with the same hidden states."""

import copy
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from changed import changed
from forked_ranks import together
from ppo_agents import SETTINGS, SPACES, Episodes, build
from torch import nn

from steadyrl.agents.engine.choice import build_engine
from steadyrl.agents.engine.inductor import InductorEngine
from steadyrl.agents.learner.optimizers.adam import BETA1
from steadyrl.agents.ppo.loss import clipped_value_loss, normalize_advantage
from steadyrl.agents.registry import Sample, finished_policy
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import EnvSpec, Step
from steadyrl.training.checkpoints.plain import from_document, to_document
from steadyrl.training.run.pending_step import PendingStep

ROWS, ENVS, LENGTH = 16, 3, 5
KINDS = ("gru", "lstm")
# One step on the whole rollout, so that its gradient is in Adam's first moment.
WHOLE = {"minibatches": 1, "epochs": 1, "max_grad_norm": 0, "clip_value": True}


class Loop:
    """Run an agent timestep by timestep, with episode starts."""

    def __init__(self, agent, **episodes):
        self.agent, self.env = agent, Episodes(**{"scale": 2.0, "mean_length": 4} | episodes)
        self.obs, self.episode_starts = self.env.reset(), np.ones(len(self.env.needs_reset), bool)
        self.rows = []

    def row(self):
        actor = self.agent.actor(len(self.episode_starts), explore=True)
        decision = actor.act(self.obs, self.episode_starts)
        self.rows.append((self.obs, self.episode_starts, decision))
        step = self.env.step()
        self.agent.observe(decision, step)
        self.obs, self.episode_starts = step.obs, ~step.valid

    def play(self, rows, *, learn=True):
        found = []
        for _ in range(rows):
            self.row()
            metrics = self.agent.update() if learn else None
            if metrics is not None:
                found.append(dict(zip(metrics.names, metrics.values.tolist(), strict=True)))
        return found


class Plain:
    """The same network with PyTorch's own cells, for one environment at one timestep."""

    def __init__(self, network, kind):
        self.network, memory = network, network.cell
        self.lstm, self.groups = kind == "lstm", memory.hidden_shape[0]
        self.weights = dict(network.named_parameters())
        cell = nn.LSTMCell if self.lstm else nn.GRUCell
        self.cells = [
            cell(memory.weight_ih.shape[1], memory.size, device="meta") for _ in range(self.groups)
        ]

    def cell(self, group, x, state):
        m, size = self.network.cell, self.network.cell.size
        parts = {
            "weight_ih": m.weight_ih[group].t(),
            "weight_hh": m.weight_hh[group].t(),
            "bias_ih": m.bias[group, 0],
            "bias_hh": torch.zeros_like(m.bias[group, 0]),
        }
        if self.lstm:
            h, c = torch.func.functional_call(
                self.cells[group], parts, (x, tuple(state.split(size, -1)))
            )
            return torch.cat((h, c), -1)
        parts["bias_hh"] = torch.cat((torch.zeros(2 * size), m.candidate_bias_hh[group, 0]))
        return torch.func.functional_call(self.cells[group], parts, (x, state))

    def row(self, obs, hidden_state):
        """Return parameters [P], value [] and next hidden state [G, C]."""
        n = self.network
        x = obs.unsqueeze(0)
        features = n.trunk(x if n.normaliser is None else n.normaliser(x))
        after = [self.cell(g, features[g], hidden_state[g : g + 1]) for g in range(self.groups)]
        hidden = [state[:, : n.cell.size] for state in after]
        return n.policy(hidden[0])[0], n.value(hidden[-1])[0, 0], torch.cat(after)

    def nothing(self):
        return torch.zeros(self.network.cell.hidden_shape)


def of(agent, kind):
    return Plain(agent._learner.network.module, kind)


@pytest.mark.parametrize(("kind", "shared"), list(product(KINDS, (False, True))))
def test_recurrent_acting_equals_a_loop_with_resets(kind, shared):
    agent = build(recurrent__cell=kind, shared_trunk=shared, normalize_obs=shared)
    loop = Loop(agent)
    loop.play(ROWS, learn=False)
    plain, rollout = of(agent, kind), agent._rollout
    valid = rollout.flags[2]
    assert 0 < valid.sum() < valid.numel(), "no episode ended"
    agent._compute_targets()
    stored = torch.cat((rollout.obs, torch.from_numpy(loop.obs)[None]))
    if shared:  # the first rollout is stored unnormalised
        agent._observations.normaliser.freeze_()
        stored[-1] = agent._observations.normaliser(stored[-1])
        agent._observations.normaliser.set_identity_()
    for env in range(ENVS):
        hidden_state = plain.nothing()
        for t in range(ROWS + 1):
            if t and not valid[t - 1, env]:
                hidden_state = plain.nothing()
            with torch.no_grad():
                parameters, value, hidden_state = plain.row(stored[t, env], hidden_state)
            # Also for truncated episodes and at the end: the hidden state before the reset.
            torch.testing.assert_close(rollout.value[t, env], value, atol=1e-5, rtol=1e-5)
            if t < ROWS:
                action = rollout.action[t, env]
                expected = agent._actor._head.log_prob(parameters[None], action[None])[0]
                torch.testing.assert_close(rollout.log_prob[t, env], expected, atol=1e-5, rtol=0)


def learned(agent):
    """Run the due gradient step; return its gradient and the network before it."""
    reference = copy.deepcopy(agent._learner.network.module)
    for parameter in reference.parameters():
        parameter.grad = None
    before = agent._learner.optimizer_state.exp_avg.clone()
    agent.update()
    return (agent._learner.optimizer_state.exp_avg - BETA1 * before) / (1 - BETA1), reference


def unrolled(loop, network, kind):
    """Yield each valid step of the last rollout, evaluated from stored hidden states."""
    rollout, plain = loop.agent._rollout, Plain(network, kind)
    valid = rollout.flags[2]
    for env in range(ENVS):
        hidden_state = plain.nothing()
        for t in range(ROWS):
            if t % loop.agent._settings.length == 0:
                hidden_state = loop.rows[t - ROWS][2].hidden_state[env].clone()
            elif not valid[t - 1, env]:
                hidden_state = plain.nothing()
            parameters, value, hidden_state = plain.row(rollout.obs[t, env], hidden_state)
            if valid[t, env]:
                yield (t, env), parameters[None], value


@pytest.mark.parametrize(
    ("kind", "length", "microbatches"),
    [("gru", 5, 1), ("lstm", 5, 1), ("lstm", 4, 2), ("gru", 99, 2)],
)
def test_recurrent_updates_equal_a_loop_from_stored_hidden_states(kind, length, microbatches):
    changes = {"grad_accumulation": microbatches, "recurrent__sequence_length": length}
    agent = build(recurrent__cell=kind, **WHOLE, **changes)
    loop = Loop(agent)
    loop.play(ROWS)
    loop.play(ROWS, learn=False)
    clip, s, rollout = agent.clip, agent._settings, agent._rollout
    gradient, reference = learned(agent)
    valid = rollout.flags[2]
    weight_ = valid.float() / valid.sum()
    advantage = normalize_advantage(rollout.advantage.flatten(), weight_.flatten()).view(ROWS, ENVS)
    # Padding has weight 0.
    advantage = torch.where(valid, normal(rollout.advantage, valid), advantage)
    loss = 0
    for at, parameters, value in unrolled(loop, reference, kind):
        log_prob, entropy = agent._actor._head.evaluate(parameters, rollout.action[at][None])
        ratio, a = (log_prob[0] - rollout.log_prob[at]).exp(), advantage[at]
        squares = clipped_value_loss(value, rollout.value[at], rollout.return_[at], clip)
        one = -torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
        loss = loss + (one + s.value_coef * squares - s.entropy_coef * entropy[0])
    (loss / valid.sum()).backward()
    theirs = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(gradient, theirs, atol=1e-5, rtol=1e-4)


def normal(advantage, valid):
    counted = advantage[valid]
    return (advantage - counted.mean()) / (counted.std(correction=0) + 1e-8)


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_first_epoch_starts_with_ratio_1_and_zero_kl(kind, name, precision):
    agent = build(action=SPACES[name], recurrent__cell=kind, normalize_obs=True, epochs=1)
    agent.set_precision(precision)
    if precision == "bf16":
        agent._learner.network.weights.mul_(2)  # amplify differences
    loop = Loop(agent)
    loop.play(3 * ROWS - 1)
    seen, step = [], agent._learner.step

    def record(batch, rate, *numbers):
        parameters, value, _ = agent._learner.forward(
            batch.obs, batch.hidden_state, batch.episode_starts
        )
        log_prob = agent._actor._head.log_prob(parameters, batch.action)
        seen.append((log_prob[batch.loss_mask], batch.log_prob[batch.loss_mask]))
        seen.append((value[batch.loss_mask], batch.value[batch.loss_mask]))
        return step(batch, 0.0, *numbers)

    agent._learner.step = record
    (metrics,) = loop.play(1)
    assert len(seen) == 2 * SETTINGS.minibatches
    for now, then in seen:
        torch.testing.assert_close(now, then, atol=2e-6, rtol=1e-5)
    assert abs(metrics["train/approx_kl"]) < 1e-6
    assert metrics["train/clip_fraction"] == 0


@pytest.mark.parametrize("minibatches", [1, 4, 12])
def test_each_valid_sample_is_used_once_per_epoch(minibatches):
    agent = build(shape=(1,), recurrent__cell="gru", minibatches=minibatches, grad_accumulation=2)
    seen, step = [], agent._learner.step

    def record(batch, *numbers):
        weight_ = agent._learner.sample_weight
        assert torch.equal(weight_ > 0, batch.loss_mask)
        assert weight_.sum() == pytest.approx(1)
        seen.append(batch.obs[batch.loss_mask])
        return step(batch, *numbers)

    agent._learner.step = record
    loop, ids = Loop(agent, shape=(1,)), iter(range(10**6))
    expected = []
    for _ in range(ROWS):
        loop.obs = np.array([[next(ids)] for _ in range(ENVS)], np.float32)
        loop.row()
        expected += loop.rows[-1][0][~loop.episode_starts].flatten().tolist()
    agent.update()
    used = torch.cat(seen).flatten().tolist()
    assert sorted(used) == sorted(expected * SETTINGS.epochs)
    assert len(expected) < ROWS * ENVS


def test_microbatches_do_not_outnumber_sequences():
    weights = []
    for microbatches in (ROWS * ENVS, 10**6):  # sequences of one timestep
        changes = {"recurrent__sequence_length": 1, "minibatches": 1, "epochs": 1}
        agent = build(recurrent__cell="gru", grad_accumulation=microbatches, **changes)
        Loop(agent).play(ROWS)
        assert agent.updates == 1
        weights.append(agent._learner.network.weights)
    assert torch.equal(*weights)


def test_invalid_steps_change_nothing():
    weights = []
    for broken in (False, True):
        agent = build(action=SPACES["box"], recurrent__cell="lstm", epochs=3)
        loop = Loop(agent)
        loop.play(ROWS, learn=False)
        if broken:
            ghosts = ~agent._rollout.flags[2]
            assert ghosts.any()
            agent._rollout.obs[ghosts] = 1e6
            agent._rollout.action[ghosts] = -1e3
            agent._rollout.log_prob[ghosts] = -1e3  # would give an infinite ratio
        agent.update()
        weights.append(agent._learner.network.weights.clone())
    assert torch.isfinite(weights[0]).all()
    assert torch.equal(*weights)


@pytest.mark.parametrize("at", [0, 5, 7, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_agent_continues_bitwise(kind, at):
    changes = {"recurrent__cell": kind, "normalize_obs": True}
    one, other = build(seed=1, **changes), build(seed=2, **changes)
    loop = Loop(one)
    loop.play(2 * ROWS)
    loop.play(at, learn=False)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    reference = copy.deepcopy(loop)
    reference.agent = other
    for each in (loop, reference):
        each.agent.update()
        each.play(2 * ROWS)
    assert one.updates == other.updates > 8
    assert same(one.state_dict(), other.state_dict())


def test_a_pending_step_is_stored_with_its_hidden_state():
    agent = build(recurrent__cell="gru")
    loop, retained, other = (
        Loop(agent),
        PendingStep(torch.device("cpu")),
        PendingStep(torch.device("cpu")),
    )
    loop.play(LENGTH, learn=False)
    decision = agent.actor(ENVS, explore=True).act(loop.obs, loop.episode_starts)
    retained.content = decision, loop.env.step()
    document, tensors = to_document(retained.state_dict())
    other.load_state_dict(from_document(document, tensors))
    agent.observe(*other.content)
    assert decision.hidden_state.any()
    assert torch.equal(agent._rollout.hidden_state[1], decision.hidden_state)


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_actors_have_separate_hidden_states(kind):
    agent = build(recurrent__cell=kind)
    Loop(agent).play(ROWS + 3)
    state = copy.deepcopy(agent.state_dict())
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    finished = finished_policy(agent._settings, spec, agent.weights(), device=torch.device("cpu"))
    plain = of(agent, kind)
    for actor in (agent.actor(7, explore=False), agent.actor(7, explore=False), finished):
        random, hidden_states = np.random.default_rng(3), [None] * 7
        episode_starts = np.ones(7, bool)
        for _ in range(9):
            obs = random.normal(size=(7, 4)).astype(np.float32)
            action = actor.act(obs, episode_starts).env_action
            for env in range(7):
                hidden_state = plain.nothing() if episode_starts[env] else hidden_states[env]
                with torch.no_grad():
                    parameters, _, hidden_states[env] = plain.row(
                        torch.from_numpy(obs[env]), hidden_state
                    )
                assert action[env] == parameters.argmax()
            episode_starts = random.random(7) < 0.2
    assert same(agent.state_dict(), state)


def test_sampling_policies_are_recurrent():
    agent = build(recurrent__cell="gru")
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    settings_, drawn = agent._settings, Sample(2, 0)
    cpu = torch.device("cpu")
    actor = finished_policy(settings_, spec, agent.weights(), device=cpu, sample=drawn)
    obs, episode_starts = np.ones((2, 4), np.float32), np.ones(2, bool)
    first, second = (actor.act(obs, now).value for now in (episode_starts, np.array([False, True])))
    assert second[0] != first[0]
    assert second[1] == first[1]


@pytest.mark.parametrize("shared", [None, False])
def test_recurrent_ppo_on_images(shared):
    changes = {
        "rollout_steps": 4,
        "minibatches": 2,
        "recurrent__sequence_length": 2,
        "recurrent__cell": "lstm",
    }
    agent = build(2, shape=(2, 9, 9), dtype="uint8", shared_trunk=shared, **changes)
    random, no, yes = np.random.default_rng(0), np.zeros(2, bool), np.ones(2, bool)
    for _ in range(4):
        obs = random.integers(0, 256, (2, 2, 9, 9), dtype=np.uint8)
        decision = agent.actor(2, explore=True).act(obs, no)
        agent.observe(decision, Step(obs, np.ones(2, np.float32), no, no, yes, ()))
    assert torch.isfinite(agent.update().values).all()
    assert agent._learner.network.module.cell.hidden_shape == (1 if shared is None else 2, 16)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"minibatches": 13}, "agent.minibatches"),  # of 12 sequences
        (
            {"batch_size": 4},
            r"agent\.batch_size=4: .* timesteps \(agent.recurrent.sequence_length\)$",
        ),
        (
            {"batch_size": 4, "recurrent__sequence_length": 99},
            r"agent\.batch_size=4: .*_length=99 is cut to agent\.rollout_steps\)$",
        ),
        ({"recurrent__sequence_length": 0}, "sequence_length"),
        ({"recurrent__size": 0}, "size"),
    ],
)
def test_invalid_recurrent_settings_are_rejected(changes, key):
    with pytest.raises(SettingError, match=key):
        build(recurrent__cell="gru", **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_chrono_initialisation_spans_the_sequence_length(kind):
    memory = build(recurrent__cell=kind, recurrent__sequence_length=10)._learner.network.module.cell
    with torch.no_grad():
        rows = torch.zeros(2, 1, memory.weight_ih.shape[1])
        memory.weight_hh.zero_()
        hidden_state = torch.ones(1, *memory.hidden_shape)
        _, after = memory(rows, hidden_state, None)
    retained = after[
        0, 0, -memory.size :
    ]  # c of an LSTM or h of a GRU: the remaining fraction of 1
    time_scales = 1 / (1 - retained)
    torch.testing.assert_close(time_scales, torch.linspace(2, 10, memory.size))


def test_feedforward_initialisation_does_not_depend_on_the_cell():
    one, other = build(), build(recurrent__size=3, recurrent__sequence_length=2)
    assert torch.equal(one._learner.network.weights, other._learner.network.weights)
    assert not any("memory" in name for name in one.weights())


@pytest.mark.machinery
@pytest.mark.parametrize(
    ("recurrent", "length", "updates", "compiled"),
    [
        ("none", 16, 20_000, False),
        ("gru", 16, 20_000, True),
        ("gru", 1, 20_000, True),
        ("gru", 16, 4_640, False),
        ("lstm", 32, 4_640, False),
        ("lstm", 100, 60_000, False),
    ],
)
def test_auto_compiles_shorter_runs_for_sequences_unless_they_are_long(
    recurrent, length, updates, compiled
):
    settings = changed(
        SETTINGS, compile="auto", recurrent__cell=recurrent, recurrent__sequence_length=length
    )
    settings = replace(settings, rollout_steps=128)
    spec = EnvSpec("Synthetic", 3, (4,), "float32", 1, SPACES["discrete"])
    rollouts = updates // (settings.epochs * settings.minibatches)
    updates = settings.expected_updates(spec, rollouts * 3 * 128)
    engine = build_engine(settings.compile, updates, spec, torch.device("cpu"))
    assert isinstance(engine, InductorEngine) == compiled


def compiled_and_eager(kind, **changes):
    found = []
    for mode in ("false", "true"):
        agent = build(2, recurrent__cell=kind, compile=mode, epochs=3, target_kl=0.1, **changes)
        metrics = Loop(agent, envs=2).play(4 * ROWS)
        found.append((agent._learner.network.weights, metrics))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_recurrent_updates_match_eager_ones(kind, caplog):
    (eager, one), (graph, other) = compiled_and_eager(kind, grad_accumulation=2, minibatches=2)
    torch.testing.assert_close(eager, graph, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert "running eagerly" not in caplog.text


def given(envs):
    """Return fixed actions, log-probabilities and steps."""
    env, random = Episodes(envs, mean_length=4), np.random.default_rng(5)
    rows, obs, episode_starts = [], env.reset(), np.ones(envs, bool)
    for _ in range(2 * ROWS):
        step = env.step()
        log_prob = random.uniform(-1.3, -0.9, envs).astype(np.float32)
        rows.append((obs, episode_starts, random.integers(0, 3, envs), log_prob, step))
        obs, episode_starts = step.obs, ~step.valid
    return rows


def learned_weights(agent, rows, mine, settle):
    """Let an agent learn from these environments; return the weights after each rollout."""
    weights, actor = [], agent.actor(mine.stop - mine.start, explore=True)
    for obs, episode_starts, action, log_prob, step in rows:
        chosen, known = (torch.from_numpy(part[mine]) for part in (action, log_prob))
        decision = actor.act(obs[mine], episode_starts[mine])
        settle(agent, step.valid[mine])
        part = Step(*(array[mine] for array in step[:-1]), ())
        agent.observe(decision._replace(raw_action=chosen, log_prob=known), part)
        if agent.update() is not None:
            weights.append(agent._learner.network.weights.detach().numpy().copy())
    return weights


def one_rank(comm, rows, changes):
    agent = build(2, recurrent__cell="gru", **changes)
    agent.attach_comm(comm)

    def settle(agent, valid):
        comm.sync_counts(int(valid.sum()), (), now=agent.syncs_this_step)

    return learned_weights(agent, rows, slice(2 * comm.rank, 2 * comm.rank + 2), settle)


def test_ppo_on_ranks_equals_one_process():
    # One minibatch of all samples, so that their order does not matter.
    changes = {"minibatches": 1, "normalize_obs": True, "epochs": 4, "seed": 3}
    rows = given(4)
    one = learned_weights(
        build(4, recurrent__cell="gru", **changes), rows, slice(0, 4), lambda agent, valid: None
    )
    ranks = together(2, one_rank, rows, changes)
    assert len(one) == 2
    for rank in ranks:
        for mine, theirs in zip(rank, one, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-6)
    assert all(np.array_equal(a, b) for a, b in zip(*ranks, strict=True))
