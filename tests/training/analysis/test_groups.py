import pytest
from written_runs import write_run

from steadyrl.core.errors import SettingError
from steadyrl.training.analysis.groups import differences, distinct_seeds, groups, label

TAG = "eval/return_mean"


def grouped(paths, by=()):
    return [(group.name, group.env, len(group.runs)) for group in groups(paths, [TAG], by)[0]]


def test_seeds_of_one_configuration_are_one_group(tmp_path):
    for seed in range(3):
        write_run(tmp_path / str(seed), {1: 1.0}, seed=seed)
    assert grouped([str(tmp_path)]) == [("dqn", "CartPole-v1", 3)]
    # A run given twice is counted once.
    assert grouped([str(tmp_path), str(tmp_path / "0")]) == [("dqn", "CartPole-v1", 3)]


def test_runs_with_foreign_configurations_form_their_own_group(tmp_path):
    write_run(tmp_path / "ours", {1: 1.0})
    write_run(tmp_path / "theirs", {1: 1.0})
    (tmp_path / "theirs" / "config.yaml").write_text("env: {id: [1, 2]}\nagent: {name: [a]}\n")
    assert [count for _, _, count in grouped([str(tmp_path)])] == [1, 1]


@pytest.mark.parametrize(
    "values",
    [
        ("/home/somebody/projects/outputs/CartPole-v1/ppo/2026-11-27_12-00-00/policy", "teacher"),
        ("0.0012345678", "learning_rate"),
        ('[{"my_module:Wrapper": {"text": "' + 70 * "x" + '1"}}]', "wrappers"),
    ],
)
def test_values_that_differ_late_are_different_groups(tmp_path, values):
    value, key = values
    other = value.replace("policy", "policy-best").replace("678", "671").replace('1"}', '2"}')
    for run, text in enumerate((value, value, other)):
        write_run(tmp_path / str(run), {1: 1.0}, seed=run)
        with (tmp_path / str(run) / "config.yaml").open("a") as file:
            file.write(f"{key}: {text}\n")
    assert [count for _, _, count in grouped([str(tmp_path)])] == [2, 1]


def test_group_names_list_differing_settings_only(tmp_path):
    for rate in (0.001, 0.01):
        for seed in range(2):
            write_run(tmp_path / f"{rate},s={seed}", {1: 1.0}, rate=rate, seed=seed)
    write_run(tmp_path / "other", {1: 1.0}, agent="ppo", rate=0.5)
    assert grouped([str(tmp_path)]) == [
        ("dqn, learning_rate=0.001", "CartPole-v1", 2),
        ("dqn, learning_rate=0.01", "CartPole-v1", 2),
        ("ppo", "CartPole-v1", 1),
    ]
    assert grouped([f"{tmp_path}/0.*"])[1][0] == "learning_rate=0.01"
    assert grouped([str(tmp_path / "0.01,s=1")])[0][0] == "dqn"  # a path with an equals sign


def test_names_and_sinks_of_runs_are_no_differences():
    config = {"agent.name": "dqn", "env.id": "CartPole-v1", "agent.gamma": 0.9}
    about = {"run_name": "a", "log.wandb.tags": ["x"], "log.tensorboard": False}
    others = {"run_name": "b", "log.wandb.tags": [], "log.tensorboard": True}
    assert differences([config | about, config | others]) == [{}, {}]


def test_equal_values_are_no_differences_however_they_were_typed(tmp_path):
    """Nor are keys that make no difference to what is learned."""
    lines = (
        "total_steps: 30000\nthreads: auto\nlog: {every: 1000}\n",
        "total_steps: 30000.0\nthreads: 1\nlog: {every: 500}\ncheckpoint: {keep: 9}\n",
    )
    for seed in range(2):
        for at, text in enumerate(lines):
            config = write_run(tmp_path / f"{seed}-{at}", {1: 1.0}, seed=seed) / "config.yaml"
            config.write_text(config.read_text().replace("total_steps: 30000\n", text))
    assert grouped([str(tmp_path)]) == [("dqn", "CartPole-v1", 4)]
    found, left_out = distinct_seeds(groups([str(tmp_path)], [TAG])[0])
    assert [len(group.runs) for group in found] == [2] and len(left_out) == 2
    assert differences([{"a": [1.0, True]}, {"a": [1, "true"]}, {"a": [1, 2]}])[2] == {"a": [1, 2]}
    assert differences([{"a": 1.0}, {"a": True}, {"a": 1}])[0] == {"a": 1.0}  # 1 is not true


def test_seeds_that_were_added_and_compile_are_of_the_same_group(tmp_path):
    for seed, compiled in enumerate(("auto", "auto", "true")):  # of three seeds it pays off
        config = write_run(tmp_path / f"seed-{seed}", {1: 1.0}, seed=seed) / "config.yaml"
        text = config.read_text().replace("agent: {", f"agent: {{compile: '{compiled}', ")
        config.write_text(text)
    assert grouped([str(tmp_path)]) == [("dqn", "CartPole-v1", 3)]


def test_an_experiment_evaluated_in_two_ways_is_one_sample_of_a_named_group(tmp_path):
    for name, every in (("a", 100), ("b", 200)):
        config = write_run(tmp_path / name, {1: 1.0}) / "config.yaml"
        config.write_text(f"{config.read_text()}eval: {{every: {every}}}\n")
    assert len(grouped([str(tmp_path)])) == 2  # scores of another kind
    found, _ = distinct_seeds(groups([f"mine={tmp_path}/*"], [TAG])[0])
    assert [len(group.runs) for group in found] == [1]


def test_by_selects_the_settings_to_group_by(tmp_path):
    for rate in (0.001, 0.01):
        for env in ("CartPole-v1", "Acrobot-v1"):
            write_run(tmp_path / f"{rate}-{env}", {1: 1.0}, rate=rate, env=env)
    assert grouped([str(tmp_path)], ["agent"]) == [
        ("dqn", "Acrobot-v1", 2),
        ("dqn", "CartPole-v1", 2),
    ]
    with pytest.raises(SettingError, match=r"did you mean agent\.learning_rate"):
        grouped([str(tmp_path)], ["agent.learningrate"])


def test_a_named_group_is_split_by_environment(tmp_path):
    for env in ("CartPole-v1", "Acrobot-v1"):
        write_run(tmp_path / env, {1: 1.0}, env=env)
    (tmp_path / "empty").mkdir()
    assert grouped([f"mine={tmp_path}/*"]) == [
        ("mine", "Acrobot-v1", 1),
        ("mine", "CartPole-v1", 1),
    ]
    assert groups([f"mine={tmp_path}/*"], [TAG])[1] == [
        "mine: left out empty, which has no metrics.jsonl"
    ]


def test_a_configuration_has_one_name_in_all_environments():
    """Also in those that have runs of no other one: else these would be pooled."""
    configs = [
        {"agent.name": "ppo", "env.id": env, "agent.learning_rate": rate}
        for env, rate in (("Pong", 1), ("Pong", 2), ("Qbert", 1), ("Seaquest", 2))
    ]
    assert [label(each) for each in differences(configs)] == [
        "Pong, learning_rate=1", "Pong, learning_rate=2", "Qbert, learning_rate=1",
        "Seaquest, learning_rate=2",
    ]  # fmt: skip


def test_a_missing_key_counts_as_a_difference():
    configs = [{"agent.name": "a", "env.kwargs.slip": True}, {"agent.name": "a", "seed": 3}]
    found = differences(configs)
    assert found == [{"env.kwargs.slip": True}, {"env.kwargs.slip": None}]
    assert label(found[0]) == "slip=true"


def test_ambiguous_key_names_are_written_in_full():
    assert (
        label({"eval.every": 1, "log.every": 2, "a.b": 0.5}) == "eval.every=1, log.every=2, b=0.5"
    )


def test_repeats_of_a_seed_are_no_further_samples(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1), ("d", 0)):
        write_run(tmp_path / name, {1: 1.0}, seed=seed)
    (tmp_path / "b" / "summary.json").write_text('{"status": "finished"}')
    write_run(tmp_path / "e", {1: 1.0}, seed=0, rate=0.1)
    found, left_out = distinct_seeds(groups([str(tmp_path)], [TAG])[0])
    assert [[run.path.name for run in group.runs] for group in found] == [["b", "c"], ["e"]]
    assert left_out == ["learning_rate=0.001: seed 0 3 times with the same settings: left out a, d"]
    # In a group of different settings each is a sample.
    found, left_out = distinct_seeds(groups([f"mine={tmp_path}/[ace]"], [TAG])[0])
    assert len(found[0].runs) == 3 and not left_out


def test_runs_of_other_programs_are_never_repeats(tmp_path):
    for name in "ab":
        write_run(tmp_path / name, {1: 1.0})
        (tmp_path / name / "config.yaml").write_text("env: {id: CartPole-v1}\n")
    found, left_out = distinct_seeds(groups([str(tmp_path)], [TAG])[0])
    assert len(found[0].runs) == 2 and not left_out
