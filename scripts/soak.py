"""Train for long and prove that nothing grows: memory, handles, and that the speed stays.

    python scripts/soak.py --steps 1e6 --agents dqn ppo --envs cartpole lunarlander
    python scripts/soak.py --steps 1e5 --agents dqn --envs cartpole --crash-every 1000

writes a page with a picture and ends with 1 if any run goes beyond the limits. Every run is
evaluated fifty times. With --crash-every its environments run in processes, each of which breaks
after so many steps and is replaced.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.soaking.report import Result, write_report
from scripts.soaking.sampling import ROOT, soak
from scripts.soaking.verdict import Limits, judge

EVALUATIONS = 50
RESTARTS = 10


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=lambda text: int(float(text)), default=1_000_000)
    parser.add_argument("--agents", nargs="+", default=["dqn", "ppo"])
    parser.add_argument("--envs", nargs="+", default=["cartpole"])
    parser.add_argument("--set", nargs="*", default=[], help="more overrides for every run")
    parser.add_argument("--runs", type=Path, default=Path("outputs/soak"), help="run directories")
    parser.add_argument("--report", type=Path, default=Path("docs/SOAK.md"))
    parser.add_argument("--every-seconds", type=float, default=5.0, help="between two samples")
    parser.add_argument("--max-slope-mb", type=float, default=1.0, help="per million steps")
    parser.add_argument("--max-speed-change", type=float, default=0.05)
    parser.add_argument("--max-growth-mb", type=float, default=5.0, help="in the part judged")
    parser.add_argument("--warmup", type=float, default=0.2, help="share of a run not judged")
    parser.add_argument(
        "--crash-every", type=int, default=0, help="steps of an environment; 0 = never"
    )
    parser.add_argument(
        "--shared-machine",
        action="store_true",
        help="judge the speed by CPU seconds; the run should be kept on one core (taskset)",
    )
    return parser.parse_args(arguments)


def overrides(agent: str, env: str, args: argparse.Namespace) -> list[str]:
    """Return what a run is told; what `--set` says comes last and wins."""
    told = [f"agent={agent}", f"env={env}", f"total_steps={args.steps}"]
    told.append(f"eval.every={max(1, args.steps // EVALUATIONS)}")
    return [*told, *(crashing(env, args.crash_every) if args.crash_every else ()), *args.set]


def crashing(env: str, every: int) -> list[str]:
    """Return the overrides that let an environment break every so many steps."""
    base = OmegaConf.select(OmegaConf.load(ROOT / "configs" / "env" / f"{env}.yaml"), "id")
    return [
        "env.id=scripts.soaking.sampling:Crashing-v0",
        f"env.kwargs={{base: {base}, every: {every}}}",
        "env.backend=async",
        "env.max_restarts=1_000_000",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Soak every agent on every environment; return the exit code."""
    args = parse(arguments)
    limits = Limits(
        args.max_slope_mb,
        args.max_growth_mb,
        args.max_speed_change,
        args.warmup,
        args.shared_machine,
        restarts=RESTARTS if args.crash_every else 0,
    )
    results: list[Result] = []
    for agent in args.agents:
        for env in args.envs:
            run_dir = (args.runs / f"{agent}-{env}").resolve()
            told = overrides(agent, env, args)
            found = soak(f"{agent} on {env}", told, run_dir, args.every_seconds)
            results.append((found, judge(found, limits)))
            for check in results[-1][1]:
                word = "ok  " if check.passed else "FAIL"
                print(f"{word} {found.title}: {check.name} {check.value} (limit {check.limit})")
            write_report(results, args.report)
    return 0 if all(check.passed for _, checks in results for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
