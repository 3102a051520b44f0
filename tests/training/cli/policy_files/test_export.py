"""`scripts/export.py` is `scripts/checkpoint.py export`; the file's name says its format."""

import re
import sys
from types import ModuleType

import pytest
import torch
from opened import job
from safetensors.numpy import load_file
from torch import nn

from steadyrl.envs.types import DiscreteActions, EnvSpec
from steadyrl.loop import train
from steadyrl.training.cli.checkpoint import main as checkpoint
from steadyrl.training.cli.policy_files.export import main
from steadyrl.training.policies import policy


def test_both_programs_export_the_same_file(tmp_path, capsys):
    train(job(tmp_path, "total_steps=50", "eval.every=0"))
    run = str(tmp_path / "run")
    main([run, "--out", str(tmp_path / "one.safetensors")])
    checkpoint(["export", run, "--out", str(tmp_path / "other.safetensors")])
    last = max((tmp_path / "run" / "checkpoints").iterdir())
    main([str(last), "--out", str(tmp_path / "saved.safetensors")])
    assert "note" not in capsys.readouterr().out
    main([run, "--out", str(tmp_path / "policy")])
    assert "note: only files whose names end in .safetensors" in capsys.readouterr().out
    beside = tmp_path / "run" / "policy" / "policy.safetensors"  # read by whom the umask lets
    assert (tmp_path / "one.safetensors").stat().st_mode == beside.stat().st_mode
    one, *others = (
        load_file(tmp_path / f"{name}.safetensors") for name in ("one", "other", "saved")
    )
    for other in others:
        assert one.keys() == other.keys() != set()
        assert all((one[name] == other[name]).all() for name in one)
    for program in (main, lambda words: checkpoint(["export", *words])):
        with pytest.raises(SystemExit) as left:
            program([run])
        assert left.value.code == 2
        assert "needs --out FILE or --onnx FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "name", "kind"),
    [
        ("--out", "q.pt", "safetensors"),
        ("--out", "policy.st", "safetensors"),
        ("--out", "policy-1.5.PTH", "safetensors"),
        ("--onnx", "q.safetensors", "onnx"),
        ("--onnx", "policy-1.5.pt2", "onnx"),
    ],
)
def test_names_of_other_formats_are_refused_with_the_name_to_write(option, name, kind, capsys):
    for program in (main, lambda words: checkpoint(["export", *words])):
        with pytest.raises(SystemExit) as left:
            program(["RUN", option, name])
        assert left.value.code == 2
        instead = f"{name.rpartition('.')[0]}.{kind}"
        line = f"error: {option}={name}: is written as {kind}: name it {instead}\n"
        assert capsys.readouterr().err == line


def test_a_dot_in_a_name_is_no_ending(tmp_path, monkeypatch, capsys):
    train(job(tmp_path, "total_steps=50", "eval.every=0"))
    run, out = str(tmp_path / "run"), tmp_path / "policy-1.5"
    main([run, "--out", str(out)])
    assert load_file(out)
    assert "note: only files whose names end in .safetensors" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "onnx", None)  # not installed
    with pytest.raises(SystemExit):
        main([run, "--onnx", str(tmp_path / "policy-2.v3")])
    assert "needs onnx" in capsys.readouterr().err
    both = ["--out", str(tmp_path / "both.safetensors"), "--onnx", str(tmp_path / "both.onnx")]
    with pytest.raises(SystemExit):
        main([run, *both])
    assert [*tmp_path.glob("both*")] == []


@pytest.mark.parametrize("option", ["--out", "--onnx"])
def test_a_name_that_is_empty_or_taken_names_its_option(option, tmp_path, capsys):
    train(job(tmp_path, "total_steps=50", "eval.every=0"))
    taken = tmp_path / "taken"
    taken.touch()
    for name, reason in (("", ".: names no file"), (taken, f"{taken}: exists already")):
        with pytest.raises(SystemExit) as left:
            main([str(tmp_path / "run"), option, str(name)])
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith(f"error: {option}={reason}")


def test_a_file_named_onnx_is_never_safetensors(tmp_path, monkeypatch, capsys):
    train(job(tmp_path, "total_steps=50", "eval.every=0"))
    monkeypatch.setitem(sys.modules, "onnx", None)  # not installed
    out = tmp_path / "policy.onnx"
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path / "run"), "--out", str(out)])
    assert left.value.code == 2
    line = f"error: --onnx={out}: needs onnx: pip install onnx onnxruntime\n"
    assert capsys.readouterr().err == line
    assert not out.exists()
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path / "run"), "--out", str(out), "--onnx", str(tmp_path / "other.onnx")])
    assert left.value.code == 2
    assert "--onnx names one too" in capsys.readouterr().err


def test_what_the_exporter_cannot_do_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError("Exporting the operator 'aten::svd' is not supported")

    train(job(tmp_path, "total_steps=50", "eval.every=0"))
    for module in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(SystemExit) as left:
        main([str(tmp_path / "run"), "--out", str(tmp_path / "policy.onnx")])
    assert left.value.code == 2
    assert "this policy cannot be exported: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("policy*")] == []


class Pooled(nn.Module):
    """A network of somebody, with a layer that ONNX has not."""

    def __init__(self):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool1d(3)

    def forward(self, obs):
        return self.pool(obs.unsqueeze(1)).argmax(-1)


class Decomposed(nn.Module):
    """A network of somebody, with an operator that ONNX has not."""

    def forward(self, obs):
        return torch.linalg.svdvals(obs.unsqueeze(1)).argmax(-1)


@pytest.mark.parametrize(
    ("module", "operator"),
    [
        (Pooled(), "operator adaptive_avg_pool1d, output size that are not factor of input size"),
        (Decomposed(), "operator 'aten::linalg_svdvals' to ONNX opset version "),
    ],
)
def test_an_operator_that_cannot_be_exported_is_named_in_one_line(
    module, operator, tmp_path, monkeypatch, capfd
):
    train(job(tmp_path, "total_steps=50", "eval.every=0"))
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = EnvSpec("Synthetic", 1, (4,), "float32", 1, DiscreteActions(2))
    monkeypatch.setattr(policy, "build_policy_module", lambda _: (module, spec))
    capfd.readouterr()
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run"), "--out", str(tmp_path / "policy.onnx")])
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(
        rf"error: --onnx=\S+: this policy cannot be exported: .*{operator}.*\n", err
    )
    assert "Caused by" not in err and "feel free" not in err


def test_help_offers_what_can_be_exported(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "run directory, its policy/ or policy-best/, or a checkpoint" in text
