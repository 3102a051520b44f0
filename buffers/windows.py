"""n-step windows and frame stacks on the host: read from the ring when sampled, in one kernel."""

from __future__ import annotations

from buffers.kernel import kernel
from buffers.timeline import ENDED, TERMINATED, VALID


@kernel
def newest_frames(flags, row, env, stack, chosen):  # type: ignore[no-untyped-def]
    """Write the slots of the frames that make the stack at `row`, oldest first.

    Before the episode's first frame (the row after an invalid one) it is repeated.
    """
    rows, envs = flags.shape
    first = row
    for age in range(stack):
        chosen[stack - 1 - age] = first * envs + env
        before = (first - 1) % rows
        if flags[before, env] & VALID:
            first = before
        else:
            for older in range(age + 1, stack):
                chosen[stack - 1 - older] = chosen[stack - 1 - age]
            break


@kernel
def read_windows(  # type: ignore[no-untyped-def]
    flags, frames, actions, rewards, gammas, index, chosen, obs, next_obs, action, reward, discount
):
    """Gather B transitions whose n-step windows begin at `index`.

    flags [rows, N], frames [rows * N, F], actions and rewards [rows, N], gammas [n + 1] powers;
    obs and next_obs [B, stack, F]. R = Σ_{k<m} γ^k r_k, discount = γ^m (1 − terminated), where m
    is n or what is left of the episode.
    """
    rows, envs = flags.shape
    n_step = gammas.shape[0] - 1
    stack, size = obs.shape[1], obs.shape[2]
    for b in range(index.shape[0]):
        start, env = index[b] // envs, index[b] % envs
        row, steps, total = start, 0, 0.0
        while True:
            total += gammas[steps] * rewards[row, env]
            state = flags[row, env]
            steps += 1
            row = row + 1 if row + 1 < rows else 0
            if steps == n_step or state & ENDED:
                break
        action[b] = actions[start, env]
        reward[b] = total
        discount[b] = 0.0 if state & TERMINATED else gammas[steps]
        newest_frames(flags, start, env, stack, chosen[0])
        newest_frames(flags, row, env, stack, chosen[1])
        for place in range(stack):
            frame, next_frame = frames[chosen[0, place]], frames[chosen[1, place]]
            for i in range(size):
                obs[b, place, i] = frame[i]
            for i in range(size):
                next_obs[b, place, i] = next_frame[i]
