import argparse

import pytest

from scripts.benchmarks import growth


@pytest.mark.slow
def test_stored_losses_grow_and_recorded_metrics_do_not(capsys):
    parser = argparse.ArgumentParser()
    growth.add_parser(parser.add_subparsers())
    args = parser.parse_args(["graph_leak", "--losses", "500", "--cycles", "3"])
    args.run(args)
    cells = [line.split("|") for line in capsys.readouterr().out.splitlines() if "KB" in line]
    grown = [float(cell[2].replace("KB", "").replace(",", "")) for cell in cells]
    graphs = [int(cell[4].replace(",", "")) for cell in cells]
    stored, after_backward, recorded, _ = grown
    assert stored > 10_000 and after_backward > 1_000 and recorded < 100
    assert graphs[0] >= 500 and graphs[1] >= 500 and graphs[2] == 0
