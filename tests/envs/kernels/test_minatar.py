"""MinAtar kernels at difficulties that a random player never reaches."""

from __future__ import annotations

import numpy as np
import pytest
from toy_environments import settings

from steadyrl.envs.backends.kernel import KernelBackend
from steadyrl.envs.backends.sync import SyncBackend
from steadyrl.envs.vector import VectorEnv

pytest.importorskip("minatar")
ENVS = 3


def hard_asterix(game, state):
    import steadyrl.envs.kernels.minatar.asterix as kernel

    game.spawn_speed = state[kernel.SPAWN] = 1
    game.move_speed = state[kernel.MOVE] = 2
    game.ramp_timer = state[kernel.RAMP_IN] = 3
    game.ramp_index = state[kernel.RAMP] = 1


def hard_seaquest(game, state):
    import steadyrl.envs.kernels.minatar.seaquest as kernel

    game.e_spawn_speed = state[kernel.SPAWN] = 1
    game.e_spawn_timer = state[kernel.SPAWN_IN] = 0
    game.move_speed = state[kernel.MOVE] = 3
    game.ramp_index = state[kernel.RAMP] = 1
    game.diver_count = state[kernel.ABOARD] = 5 + len(game.e_fish) % 2
    game.d_spawn_timer = state[kernel.DIVER_IN] = 0
    game.oxygen = state[kernel.OXYGEN] = 150
    # Above the bullets, and about to surface.
    game.sub_y = state[kernel.SUB_Y] = 1
    game.surface, state[kernel.SURFACED] = False, 0


def hard_space_invaders(game, state):
    import steadyrl.envs.kernels.minatar.space_invaders as kernel

    game.enemy_move_interval = state[kernel.MOVE] = 7
    game.alien_map[:] = 0
    game.alien_map[7, [4, 6]] = 1
    boards = state[kernel.FIRST :].reshape(3, 10, 10)
    boards[kernel.ALIENS] = game.alien_map


GAMES = {"Asterix": hard_asterix, "Seaquest": hard_seaquest, "SpaceInvaders": hard_space_invaders}


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("timesteps", [700, pytest.param(34_000, marks=pytest.mark.slow)])
def test_kernels_equal_minatar_at_the_hardest_waves(game, timesteps):
    config = settings(f"MinAtar/{game}-v0", num_envs=ENVS)
    kernel, original = KernelBackend(config, seed=3), SyncBackend(config, seed=3)
    rng, ended = np.random.default_rng(0), 0
    with VectorEnv(kernel) as ours, VectorEnv(original) as theirs:
        ours.reset(), theirs.reset()
        action = np.zeros(ENVS, np.int64)
        for t in range(timesteps):
            for env in np.flatnonzero(ours.episode_starts):
                inner = original._envs[env]._env.unwrapped.game.env
                GAMES[game](inner, kernel.sim.int_state[env])
            fresh = rng.random(ENVS) < 0.6
            action[fresh] = rng.integers(0, 6, fresh.sum())
            step, expected = ours.step(action), theirs.step(action)
            for array, other in zip(step[:5], expected[:5], strict=True):
                assert array.tobytes() == other.tobytes(), (t, array, other)
            ended += int(step.terminated.sum())
    assert ended > 10
