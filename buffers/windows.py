"""n-step windows and frame stacks on the host: read from the ring when sampled, in one kernel."""

from __future__ import annotations

from buffers.kernel import kernel
from buffers.prefetch import prefetch
from buffers.timeline import ENDED, TERMINATED, VALID


@kernel
def stack_slots(flags, slot, chosen):  # type: ignore[no-untyped-def]
    """Write the slots of the frames that make the stack at `slot`, oldest first.

    Before the episode's first frame (the row after an invalid one) it is repeated.
    """
    stack = chosen.shape[0]
    envs = flags.shape[1]
    slots = flags.size
    flat = flags.reshape(slots)
    started = False
    for place in range(stack - 1, -1, -1):
        chosen[place] = slot
        before = slot - envs if slot >= envs else slot - envs + slots
        started = started or not flat[before] & VALID
        if not started:
            slot = before


@kernel
def fetch_windows(flags, frames, actions, rewards, index, reach, size):  # type: ignore[no-untyped-def]
    """Ask for the lines that full windows at `index` begin and end with; all arrays flat."""
    slots = flags.size
    for b in range(index.shape[0]):
        start = index[b]
        end = start + reach if start + reach < slots else start + reach - slots
        prefetch(flags, start)
        prefetch(rewards, start)
        prefetch(actions, start)
        prefetch(frames, start * size)
        prefetch(frames, end * size)


@kernel
def read_windows(  # type: ignore[no-untyped-def]
    flags, frames, actions, rewards, gammas, index, chosen, obs, next_obs, action, reward, discount
):
    """Gather B transitions whose n-step windows begin at `index`.

    flags, actions and rewards [rows, N], frames [rows * N, F], gammas [n + 1] powers of γ;
    obs and next_obs [B, stack, F]. R = Σ_{k<m} γ^k r_k, discount = γ^m (1 − terminated), where m
    is n or what is left of the episode.
    """
    envs, slots = flags.shape[1], flags.size
    n_step = gammas.shape[0] - 1
    stack, size = obs.shape[1], obs.shape[2]
    flat_flags, flat_rewards = flags.reshape(slots), rewards.reshape(slots)
    flat_actions = actions.reshape(slots)
    fetch_windows(
        flat_flags,
        frames.reshape(slots * size),
        flat_actions,
        flat_rewards,
        index,
        n_step * envs,
        size,
    )
    for b in range(index.shape[0]):
        start = slot = index[b]
        steps, total = 0, 0.0
        while True:
            total += gammas[steps] * flat_rewards[slot]
            state = flat_flags[slot]
            steps += 1
            slot = slot + envs if slot + envs < slots else slot + envs - slots
            if steps == n_step or state & ENDED:
                break
        action[b] = flat_actions[start]
        reward[b] = total
        discount[b] = 0.0 if state & TERMINATED else gammas[steps]
        chosen[0, stack - 1], chosen[1, stack - 1] = start, slot
        if stack > 1:
            stack_slots(flags, start, chosen[0])
            stack_slots(flags, slot, chosen[1])
        for place in range(stack):
            frame, next_frame = chosen[0, place], chosen[1, place]
            for i in range(size):
                obs[b, place, i] = frames[frame, i]
            for i in range(size):
                next_obs[b, place, i] = frames[next_frame, i]
