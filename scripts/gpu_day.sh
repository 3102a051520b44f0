#!/usr/bin/env bash
# GPU report: GPU tests, then speed, memory and synchronisations of every training mode, on one page.
#
#     scripts/gpu_day.sh [--reduced] [FOLDER]
#
# Needs a Python environment with this program and the extras dev and atari; no network. Without a GPU
# it runs a reduced version on the CPU: every part is tried, and the page lists what was skipped.
set -u
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python=$(command -v python || command -v python3) # some machines have only python3
reduced=""
if [ "${1:-}" = "--reduced" ]; then reduced=yes; shift; fi
folder="${1:-outputs/gpu_day}"
mkdir -p "$folder"
page="$folder/GPU_DAY.md" log="$folder/gpu_day.log" failed=0
: >"$log"

card=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
device=cuda
if [ -z "$card" ]; then
    reduced=yes device=cpu
    echo "no GPU here: the reduced form, on the CPU"
fi
iterations=1000 limit=1800
if [ -n "$reduced" ]; then iterations=12 limit=600; fi

say() { echo "$*" >>"$page"; }
skipped=()
skip() { skipped+=("$*"); echo "skipped: $*"; }

# Add a row to the page: a name, then overrides. A failure is a row too; the log has its error.
work() {
    local name="$1" row
    shift
    echo "$name"
    if row=$(timeout "$limit" "$python" scripts/benchmark.py card --iterations "$iterations" \
        --name "$name" "device=$device" "$@" 2>>"$log" | tee -a "$log" | grep '^| ' | tail -1) && [ -n "$row" ]; then
        say "$row"
    else
        say "| $name | $device | failed: gpu_day.log | | | | |"
        failed=1
    fi
}

# Run one configuration in every mode that this machine supports.
ways() {
    local name="$1" replay precision
    shift
    work "$name, eager" "$@" agent.compile=false
    if [ "$device" = cpu ]; then return; fi
    work "$name, compiled" "$@" agent.compile=true
    work "$name, CUDA graph" "$@" agent.compile=cudagraph
    for precision in tf32 bf16; do
        work "$name, CUDA graph, $precision" "$@" agent.compile=cudagraph "precision=$precision"
    done
    case " $* " in *" agent=dqn "*)
        for replay in cpu cuda; do
            work "$name, CUDA graph, replay on $replay" "$@" agent.compile=cudagraph "agent.replay.device=$replay"
            work "$name, CUDA graph, replay on $replay, priorities" "$@" agent.compile=cudagraph \
                "agent.replay.device=$replay" agent.replay.prioritized=true
        done ;;
    esac
}

# The sizes of CleanRL's published settings (dqn.py, ppo.py, dqn_atari.py, ppo_atari.py) in our keys.
# LeanRL has published speeds for them: PPO on Atari, 6,809 frames/s with CUDA graphs.
dqn=(agent=dqn env=cartpole agent.n_step=1 agent.double=false agent.dueling=false
    agent.replay.capacity=10_000 "agent.hidden=[120,84]" agent.batch_size=128 agent.learning_rate=2.5e-4
    agent.learning_starts=1000 agent.train_every=10 agent.updates_per_train=1 agent.target_every=500
    agent.replay.prioritized=false)
ppo=(agent=ppo env=cartpole env.num_envs=4 agent.rollout_steps=128 agent.minibatches=4 agent.epochs=4
    "agent.hidden=[64,64]" agent.learning_rate=2.5e-4 agent.entropy_coef=0.01 agent.normalize_obs=false
    agent.normalize_reward=false agent.target_kl=null)
atari_dqn=(agent=dqn env=atari env.id=ALE/Breakout-v5 env.num_envs=1 agent.n_step=1 agent.double=false
    agent.dueling=false agent.replay.capacity=100_000 "agent.hidden=[512]" agent.batch_size=32
    agent.learning_rate=1e-4 agent.learning_starts=1000 agent.train_every=4 agent.updates_per_train=1
    agent.target_every=1000 agent.clip_reward=true agent.replay.prioritized=false)
atari_ppo=(agent=ppo env=atari env.id=ALE/Breakout-v5 env.num_envs=8 agent.rollout_steps=128
    agent.minibatches=4 agent.epochs=4 "agent.hidden=[512]" agent.learning_rate=2.5e-4 agent.clip=0.1
    agent.entropy_coef=0.01 agent.target_kl=null agent.clip_reward=true)
if [ "$device" = cpu ]; then
    atari_ppo+=(env.num_envs=2 agent.rollout_steps=8 agent.epochs=1)
    atari_dqn+=(agent.learning_starts=100 agent.replay.capacity=1000)
    dqn+=(agent.learning_starts=100)
    skip "compiled and recorded updates, tf32 and bf16 at speed, and the replay on a device: no GPU"
    skip "Atari at its published size: 2 games, 8 rows and 1 epoch in place of 8, 128 and 4"
fi
if [ -n "$reduced" ]; then skip "memory after 1,000 iterations: after $iterations"; fi

: >"$page"
say "# A day with a GPU"
say ""
say "$(date -u +%Y-%m-%d), ${card:-no GPU, on the CPU}, $("$python" -c 'import torch; print("torch", torch.__version__)')," \
    "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)${reduced:+; the reduced form}."
say ""
say "## Tests"
say ""
tests=(tests)
if [ "$device" = cpu ]; then tests=(tests/agents/ppo/test_agent_cuda.py tests/buffers/replay/test_device_cuda.py); fi
if "$python" -c 'import pytest' 2>/dev/null; then
    summary=$("$python" -m pytest -m gpu -p no:cacheprovider "${tests[@]}" 2>&1 | tee -a "$log" | tail -1)
    case "$summary" in *failed* | *error*) failed=1 ;; esac
    say "\`pytest -m gpu ${tests[*]}\`: $summary"
else
    skip "the tests: there is no pytest here (the extra dev)"
fi
if [ "$device" = cpu ]; then skip "tests that need a GPU: without one they are skipped"; fi
say ""
say "## Speed, memory and waits"
say ""
say "Memory in MB: of tensors on a GPU, else of the process, after 10 and after $iterations iterations" \
    "(rollouts, or steps between updates). Waits are blocking calls in three iterations' updates, by the" \
    "profiler; on a CPU \`_local_scalar_dense\` is free. Speeds of the reduced version are not" \
    "meaningful: too few steps."
say ""
say "| work | device | steps/s | updates/s | MB after 10 | MB after $iterations | waits in updates |"
say "|---|---|---:|---:|---:|---:|---|"
ways "DQN, CartPole, as CleanRL" "${dqn[@]}"
ways "PPO, CartPole, as CleanRL" "${ppo[@]}"
if "$python" -c 'import ale_py' 2>/dev/null; then
    ways "DQN, Breakout, as CleanRL" "${atari_dqn[@]}"
    ways "PPO, Breakout, as CleanRL and LeanRL" "${atari_ppo[@]}"
else
    skip "Atari: there is no ale-py here (the extra atari)"
fi
if [ "$device" = cpu ]; then
    work "PPO, CartPole, bf16" "${ppo[@]}" agent.compile=false precision=bf16
fi
say ""
say "## Skipped"
say ""
for each in "${skipped[@]:-nothing}"; do say "- $each"; done
echo "the page: $page"
exit "$failed"
