"""Run directories as training writes them, without training."""

import json

CONFIG = """
agent: {{name: {agent}, learning_rate: {rate}, hidden: [16]}}
env: {{id: {env}, num_envs: 8}}
total_steps: 30000
seed: {seed}
run_dir: {folder}
"""


def write_run(
    folder, series, *, broken=(), agent="dqn", env="CartPole-v1", rate=0.001, seed=0, **others
):
    """Write a run with evaluations by step; `others` are further metrics by step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        CONFIG.format(agent=agent, env=env, rate=rate, seed=seed, folder=folder)
    )
    lines = []
    for step, value in series.items():
        more = {tag.replace("_", "/", 1): values[step] for tag, values in others.items()}
        record = {"step": step, "wall_seconds": step / 1000, "eval/return_mean": value, **more}
        lines.append(json.dumps(record))
    lines[1:1] = broken
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder
