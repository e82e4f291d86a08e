# SPDX-License-Identifier: MIT
"""Exceptions and objects of the package between processes: they survive pickle and deepcopy, or say why not."""
import copy
import inspect
import multiprocessing
import pickle
import warnings

import fmha
import numpy as np
import pytest

EXCEPTIONS = [x for x in vars(fmha).values() if inspect.isclass(x) and issubclass(x, fmha.FmhaError)]
WAYS = {"deepcopy": copy.deepcopy, "copy": copy.copy, **{
    f"pickle {n}": lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EXCEPTIONS, ids=lambda k: k.__name__)
def test_exceptions_are_data(kind, way):
    error = kind("EINVAL", "k's heads have 8 elements", "tensor.k")
    error.add_note("seen at noon") if hasattr(error, "add_note") else setattr(error, "__notes__", ["seen at noon"])
    found = WAYS[way](error)
    assert type(found) is kind and str(found) == str(error) == "k's heads have 8 elements"
    assert (found.code, found.field, found.args) == ("EINVAL", "tensor.k", error.args)
    assert found.__notes__ == ["seen at noon"]


def fail(_):
    x = np.zeros((1, 3, 2, 16), np.float32)
    return fmha.attention(x, x[..., :8], x)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_an_error_comes_out_of_a_pool(context):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        with multiprocessing.get_context(context).Pool(1) as pool:
            with pytest.raises(fmha.InvalidError, match="k's heads") as caught:
                pool.map_async(fail, [0]).get(timeout=60)
    assert caught.value.field == "tensor.k"


def test_what_belongs_to_a_process_says_so():
    client = fmha.default_client()
    device = client.device()
    for thing, name in ((client, "client"), (device, "device")):
        for way in WAYS.values():
            with pytest.raises(TypeError, match=f"a {name} belongs to this process"):
                way(thing)


@pytest.mark.parametrize("way", WAYS)
def test_arrays_and_descriptions_are_data(way):
    shared = fmha.empty((3, 4))
    shared[:] = 7
    found = WAYS[way](shared)
    assert found is not shared and np.array_equal(found, shared)
    info = fmha.default_client().device().info
    assert WAYS[way](info) == info and type(WAYS[way](info)) is fmha.DeviceInfo
    for function in (fmha.attention, fmha.attention_backward, fmha.append_kv, fmha.merge_states, fmha.empty, fmha.start):
        assert WAYS[way](function) is function
