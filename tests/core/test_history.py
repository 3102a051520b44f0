import gc
import json
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadyrl.core.history import History


@given(st.lists(st.floats(-1e6, 1e6)), st.integers(1, 20))
def test_a_history_holds_the_newest_values_only(values, maxlen):
    history = History(maxlen)
    for value in values:
        history.append(value)
    newest = values[-maxlen:]
    assert list(history) == newest and len(history) == len(newest)
    if newest:
        assert history.mean == pytest.approx(sum(newest) / len(newest), abs=1e-6)
    else:
        assert math.isnan(history.mean)


def test_state_survives_json_and_loads_into_a_shorter_history():
    history = History(5)
    for value in range(9):
        history.append(value)
    state = json.loads(json.dumps(history.state_dict()))
    same, shorter = History(5), History(2)
    same.load_state_dict(state)
    shorter.load_state_dict(state)
    assert list(same) == [4, 5, 6, 7, 8] and list(shorter) == [7, 8]
    history.append(99)
    assert list(same)[-1] == 8


def test_a_history_holds_no_references_to_tensors():
    tensor = torch.ones(())
    alive = weakref.ref(tensor)
    history = History(3)
    history.append(tensor)
    del tensor
    gc.collect()
    assert alive() is None and list(history) == [1.0]


def test_a_history_of_zero_length_is_rejected():
    with pytest.raises(ValueError, match="at least 1"):
        History(0)
