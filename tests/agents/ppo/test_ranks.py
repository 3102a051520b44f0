"""PPO on several ranks equals one process with all of their environments."""

import numpy as np
import pytest
import torch
from changed import changed
from forked_ranks import together
from ppo_agents import SETTINGS, Episodes, build

from steadyrl.agents.base import Decision
from steadyrl.agents.engine.inductor import CompiledGraph
from steadyrl.agents.learner.optimizers.adam import BETA1
from steadyrl.agents.ppo.minibatches import epoch_of_ranks
from steadyrl.buffers.rollout.buffer import RolloutBuffer
from steadyrl.core.errors import SettingError
from steadyrl.envs.types import Step
from steadyrl.training.checkpoints.summary import weights_hash

ENVS, ROWS = 3, 16
# One minibatch of all samples, so that their order does not matter.
WHOLE = {
    "minibatches": 1,
    "normalize_obs": True,
    "normalize_reward": True,
    "clip_value": True,
    "epochs": 6,
    "learning_rate": 3e-3,
    "target_kl": 2e-4,
}


def random_timesteps(size, rollouts):
    """Return decisions and steps of size · ENVS environments."""
    envs = size * ENVS
    env, random = Episodes(envs, mean_length=6, scale=3.0), np.random.default_rng(5)
    obs, found = env.reset(), []
    for _ in range(rollouts * ROWS):
        step = env.step()
        found.append((obs, random.integers(0, 3, envs), step))
        obs = step.obs
    return found


def part(timestep, begin, end):
    """Return the decision and step of these environments at a timestep."""
    obs, action, step = timestep
    chosen = torch.from_numpy(action[begin:end])
    decision = Decision(torch.from_numpy(obs[begin:end]), chosen, raw_action=chosen)
    return decision, Step(*(array[begin:end] for array in step[:-1]), ())


def snapshot(agent, metrics):
    learner = agent._learner
    return {
        "gradient": learner.optimizer_state.exp_avg.numpy() / (1 - BETA1),
        "weights": learner.network.weights.detach().numpy().copy(),
        "mean": agent._observations.normaliser.mean.numpy().copy(),
        "square": agent._observations.normaliser.square.numpy().copy(),
        "scale": agent._rewards.scale,
        "updates": agent.updates,
        "steps": agent._clock.steps,
        **dict(zip(metrics.names, metrics.values.tolist(), strict=True)),
    }


def evaluated(agent, decision):
    """Return a decision with what the actor would store: these actions are not its own."""
    evaluator = agent._targets.evaluator
    if not evaluator.actor_evaluates:  # done for the whole rollout at once
        return decision
    with torch.inference_mode():
        log_prob, value = evaluator._evaluate(decision.obs, decision.raw_action)
    return decision._replace(log_prob=log_prob, value=value)


def snapshots(agent, timesteps, begin, end, settle, snapshot=snapshot):
    """Feed these environments' timesteps; return a snapshot after every rollout."""
    found = []
    for timestep in timesteps:
        decision, step = part(timestep, begin, end)
        # Acting also updates statistics with the first observations.
        agent.actor(end - begin, explore=True).act(decision.obs.numpy(), ~step.valid)
        decision = evaluated(agent, decision)
        settle(agent, step)
        agent.observe(decision, step)
        metrics = agent.update()
        if metrics is not None:
            found.append(snapshot(agent, metrics))
    return found


def one_rank(comm, timesteps, changes, snapshot=snapshot):
    agent = build(ENVS, **changes)
    agent.attach_comm(comm)
    begin = comm.rank * ENVS

    def settle(agent, step):
        comm.sync_counts(int(step.valid.sum()), (), now=agent.syncs_this_step)

    return snapshots(agent, timesteps, begin, begin + ENVS, settle, snapshot)


@pytest.mark.parametrize("size", [2, 3])
def test_ppo_on_ranks_equals_one_process(size):
    timesteps = random_timesteps(size, 4)
    # The number of epochs of each rollout depends on the KL divergence.
    one = snapshots(
        build(size * ENVS, **WHOLE), timesteps, 0, size * ENVS, lambda agent, step: None
    )
    ranks = together(size, one_rank, timesteps, WHOLE)
    assert len({record["updates"] for record in one}) == len(one) == 4
    assert one[-1]["updates"] < 4 * WHOLE["epochs"], "the KL divergence never stopped an epoch"
    for rank in ranks:
        for theirs, ours in zip(rank, one, strict=True):
            assert (theirs["updates"], theirs["steps"]) == (ours["updates"], ours["steps"])
            for name in ours:
                np.testing.assert_allclose(
                    theirs[name], ours[name], rtol=2e-5, atol=1e-6, err_msg=name
                )
        np.testing.assert_array_equal(rank[-1]["weights"], ranks[0][-1]["weights"])


def test_a_reward_of_one_rank_is_the_first_of_all():
    timesteps = random_timesteps(2, 3)
    for t, (_, _, step) in enumerate(timesteps):
        step.reward[:] *= np.arange(2 * ENVS) == 0 if t >= ROWS else 0
    changes = WHOLE | {"target_kl": None, "entropy_coef": 0.0}
    one = snapshots(build(2 * ENVS, **changes), timesteps, 0, 2 * ENVS, lambda agent, step: None)
    for rank in together(2, one_rank, timesteps, changes):
        for theirs, ours in zip(rank, one, strict=True):
            np.testing.assert_allclose(theirs["weights"], ours["weights"], rtol=2e-5, atol=1e-6)
            assert theirs["train/approx_kl"] == pytest.approx(ours["train/approx_kl"], abs=1e-6)
    assert one[0]["train/approx_kl"] < 1e-7 < one[1]["train/approx_kl"]


def filled(envs, seed):
    rollout = RolloutBuffer(
        steps=ROWS, num_envs=envs, observation_shape=(2,), observation_dtype=torch.float32,
        action_shape=(), action_dtype=torch.int64, device=torch.device("cpu"),
    )  # fmt: skip
    random = np.random.default_rng(seed)
    for _ in range(ROWS):
        valid = random.random(envs) < 0.6
        no = np.zeros(envs, bool)
        rollout.add(
            torch.zeros(envs, 2), torch.zeros(envs, dtype=torch.int64), torch.zeros(envs),
            torch.zeros(envs), random.normal(3, 2, envs).astype(np.float32), no, no, valid,
        )  # fmt: skip
    rollout.compute_advantages(torch.zeros(envs), gamma=0.9, gae_lambda=0.9)
    return rollout


def one_epoch(comm, envs, parts):
    rollout = filled(envs[comm.rank], seed=comm.rank)
    found = epoch_of_ranks(rollout, parts, torch.Generator().manual_seed(comm.rank), comm)
    return [(batch.advantage.numpy(), batch.return_.numpy(), weight) for batch, weight in found]


def test_advantages_are_normalised_over_all_ranks_with_equal_step_counts():
    epochs = together(2, one_epoch, (4, 1), 13)
    assert len(epochs[0]) == len(epochs[1]) == 13
    for (one, one_raw, weight), (other, other_raw, other_weight) in zip(*epochs, strict=True):
        raw = np.concatenate((one_raw, other_raw if other_weight else []))  # V = 0: A is R
        both = np.concatenate((one, other if other_weight else []))
        np.testing.assert_allclose(both, (raw - raw.mean()) / raw.std(), rtol=1e-4, atol=1e-5)
        assert weight == pytest.approx(1 / len(both))
        assert other_weight in (0, weight)
    assert any(other_weight == 0 for _, _, other_weight in epochs[1])


def trained(comm, updates, compiled, changes):
    plain = {"minibatches": 2, "epochs": 2, "compile": compiled}
    agent = build(ENVS, seed=comm.rank, **plain | changes)
    agent.attach_comm(comm)
    env = Episodes(ENVS, seed=comm.rank)
    obs = env.reset()
    while agent.updates < updates:
        decision = agent.actor(ENVS, explore=True).act(obs, np.zeros(ENVS, bool))
        step = env.step()
        comm.sync_counts(int(step.valid.sum()), (), now=agent.syncs_this_step)
        agent.observe(decision, step)
        agent.update()
        obs = step.obs
    return weights_hash(agent.weights()), agent._learner.network.weights.detach().numpy()


def test_ranks_have_equal_weights_after_100_updates():
    (one, _), (other, _) = together(2, trained, 100, "false", {})
    assert one == other


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "adamw", "radam", "muon"])
def test_compiled_ranks_have_equal_weights(name):
    changes = {"optimizer__name": name, "hidden": (16, 16)}
    plain, graph = (together(2, trained, 20, compiled, changes) for compiled in ("false", "true"))
    assert graph[0][0] == graph[1][0]
    np.testing.assert_allclose(plain[0][1], graph[0][1], rtol=1e-4, atol=1e-5)


def test_a_batch_without_a_sequence_for_each_rank_is_refused_by_the_number_that_was_set():
    settings = changed(
        SETTINGS, batch_size=64, recurrent__cell="gru", recurrent__sequence_length=16
    )
    assert settings.of_rank(0, 4).batch_size == 16
    with pytest.raises(SettingError, match=r"agent\.batch_size=64: .* on each of 8 processes"):
        settings.of_rank(0, 8)


def one_cannot_compile(comm):
    """Train compiled, where only the first rank's compiler works."""
    if comm.rank:
        fails = pytest.MonkeyPatch()
        fails.setattr(CompiledGraph, "_compile", refuse)
    return trained(comm, 20, "true", {"hidden": (16, 16)})


def refuse(*_):
    raise RuntimeError("no compiler")


@pytest.mark.long
def test_ranks_of_which_one_cannot_compile_have_equal_weights():
    (one, _), (other, _) = together(2, one_cannot_compile)
    assert one == other
