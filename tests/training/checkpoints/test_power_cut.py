"""A power cut at any moment leaves, beside the newest checkpoint, all metrics until its step."""

import json

import pytest
from disks import RecordedOs, after_power_cut

import steadyrl
import steadyrl.core.files
import steadyrl.training.logging.sinks

SMALL = (
    "env=cartpole", "agent.hidden=[8]", "device=cpu", "total_steps=192", "env.num_envs=2",
    "eval.every=96", "env.backend=sync", "eval.episodes=2", "log.every=16", "checkpoint.every=64",
)  # fmt: skip
PPO = ("agent=ppo", "agent.rollout_steps=16", "agent.minibatches=1", "agent.epochs=1")
DQN = ("agent=dqn", "agent.learning_starts=32", "agent.replay.capacity=128")


@pytest.mark.parametrize("agent", [DQN, PPO], ids=["dqn", "ppo"])
def test_metrics_until_a_checkpoint_survive_with_it(tmp_path, monkeypatch, agent):
    recorded = RecordedOs()
    for module in (steadyrl.core.files, steadyrl.training.logging.sinks):
        monkeypatch.setattr(module, "os", recorded)
    run = tmp_path / "run"
    steadyrl.train([*agent, *SMALL, "agent.compile=false", f"run_dir={run}"], quiet=True)

    whole = (run / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line)["step"] for line in whole]
    saved, before = [], 0
    for index, (kind, *paths) in enumerate(recorded.log):
        if kind != "rename" or "/checkpoints/step-" not in paths[1]:
            continue
        step = int(paths[1].rpartition("/step-")[2][:12])
        disk = after_power_cut(recorded.log[: index + 1], names_survive=False)
        lines = disk.get(str(run / "metrics.jsonl"), b"").decode().splitlines()
        until = sum(each <= step for each in logged)
        assert lines[:until] == whole[:until]
        forced = {each[1] for each in recorded.log[before:index] if each[0] == "fsync"}
        assert until == 0 or any("/run/events.out.tfevents" in name for name in forced)
        saved.append(until)
        before = index
    assert len(saved) >= 2  # those that are due while another is written are skipped
    assert saved[-1] == len(whole)
