# SPDX-License-Identifier: MIT
"""The registry of a running daemon: kernels by their canonical names, sets, exports, imports."""
import json
import os

import pytest

import fmha_wire

DTYPES = "data_type == 'fp32'"


def export(device, kernel_filter=""):
    return json.loads(device.call_json("registry_export", {"filter": kernel_filter}))


def best_level(document):
    """The machine's best CPU level that has one of these kernels: some levels only add 16-bit ones."""
    return next(level for level in document["archs"]
                if any(k["name"].endswith(f"-{level}") for k in document["kernels"]))


def plan(device, **options):
    q = device.buffer_create(1 << 16)
    problem = {
        "batch": 1, "nhead_q": 4, "nhead_k": 2, "seqlen_q": 8, "seqlen_k": 8,
        "hdim_q": 64, "hdim_v": 64,
        **options,
        "tensors": {
            role: {"buffer": q.id, "offset": 16384 * i, "dtype": "f32"}
            for i, role in enumerate(["q", "k", "v", "o"])
        },
    }
    try:
        return problem, device.plan(problem)
    except fmha_wire.WireError as error:
        return problem, error


def test_the_plan_names_a_kernel_of_the_registry(daemon):
    with daemon.device() as device:
        _, planned = plan(device)
        name = planned["stages"][0]["kernel"]
        document = export(device, "family == 'fwd' and hdim_q == 64 and " + DTYPES)
        kernels = {kernel["name"] for kernel in document["kernels"]}
        assert name in kernels
        assert name.endswith("-" + best_level(document))
        assert document["format"] == "fmhad-registry" and document["version"] == 1
        assert document["sets"] == {"default": ["*"]}
        statistics = document["statistics"]
        assert statistics["kernels"] == len(document["kernels"])
        assert statistics["families"] == {"fwd": len(kernels)}
        assert statistics["data_types"] == {"fp32": len(kernels)}
        assert sum(statistics["pipelines"].values()) == len(kernels)


def test_explain_says_why(daemon):
    with daemon.device() as device:
        problem, planned = plan(device)
        document = json.loads(device.explain(problem))
        stage = document["plan"]["stages"][0]
        assert stage["kernel"] == planned["stages"][0]["kernel"]
        assert document["plan"]["workspace_bytes"] == planned["workspace_bytes"]
        selection = document["selections"][-1]
        assert selection["chosen"] == stage["kernel"]
        verdicts = [candidate["verdict"] for candidate in selection["candidates"]]
        assert verdicts.count("chosen") == 1
        assert selection["why"]


def test_sets_narrow_what_is_offered(daemon):
    with daemon.device() as device:
        everything = export(device, "family == 'fwd' and hdim_q == 64 and " + DTYPES)
        portable = sum(k["name"].endswith("-portable") for k in everything["kernels"])
        loaded = device.call_with_text("registry_load", '["fwd-fp32-*-h64-*-portable"]', set="mine")
        assert loaded["n_kernels"] == portable > 0
        # The default set still offers all, but a set of one's own is preferred within a level.
        device.call("registry_unload", {"set": "default"})
        _, planned = plan(device)
        assert planned["stages"][0]["kernel"].endswith("-portable")
        unloaded = device.call("registry_unload", {"set": "mine"})
        assert unloaded["n_kernels"] == portable
        _, refused = plan(device)
        assert refused.name == "ENOKERNEL"
        device.call_with_text("registry_load", '["*"]', set="default")
        _, planned = plan(device)
        assert planned["stages"][0]["kernel"].endswith("-" + best_level(everything))


def test_bad_documents_name_the_fault(daemon):
    with daemon.device() as device:
        for text in ["", "{}", "[1]", '["a", 2]', "[" * 2000, '[""]']:
            with pytest.raises(fmha_wire.WireError) as caught:
                device.call_with_text("registry_load", text, set="bad")
            assert caught.value.name == "EINVAL", text
        for text in ["", "[]", "{}", '{"format": "fmhad-registry", "version": 2}']:
            with pytest.raises(fmha_wire.WireError) as caught:
                device.call_with_text("registry_import", text)
            assert caught.value.name == "EINVAL", text
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("registry_unload", {"set": "nobody"})
        assert caught.value.name == "ENOENT"
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call("registry_export", {"filter": "hdim_q = 3"})
        assert caught.value.name == "EINVAL"
        read, write = os.pipe()  # neither a file nor a memfd: must not block the worker
        with pytest.raises(fmha_wire.WireError):
            device.call("registry_import", {}, [read])
        os.close(read)
        os.close(write)
        device.ping()


def test_an_import_merges_tuned_results(daemon):
    with daemon.device() as device:
        _, planned = plan(device)
        name = planned["stages"][0]["kernel"]
        document = export(device, "family == 'fwd' and hdim_q == 64 and " + DTYPES)
        document["kernels"] = [
            {"name": name, "priority": 3, "tuned": [{"shape": "b1h4x2q8k8", "us": 12.5}]},
            {"name": "fwd-of-another-build", "priority": 1},
        ]
        assert device.call_with_text("registry_import", json.dumps(document))["n_kernels"] == 1
        assert device.call_with_text("registry_import", json.dumps(document))["n_kernels"] == 0
        again = export(device, "family == 'fwd' and hdim_q == 64 and " + DTYPES)
        kernel = next(k for k in again["kernels"] if k["name"] == name)
        assert kernel["priority"] == 3
        assert kernel["tuned"] == [{"shape": "b1h4x2q8k8", "splits": 0, "us": 12.5, "when": 0}]
        assert again["statistics"]["states"]["tuned"] == 1
        document["device"] = "another"
        with pytest.raises(fmha_wire.WireError) as caught:
            device.call_with_text("registry_import", json.dumps(document))
        assert caught.value.field == "device"


def test_runs_are_counted(daemon):
    with daemon.device() as device:
        _, planned = plan(device)
        for _ in range(3):
            device.run(planned["plan"])
        document = export(device, "family == 'fwd' and hdim_q == 64 and " + DTYPES)
        counted = {k["name"]: k["runs"] for k in document["kernels"] if "runs" in k}
        assert counted == {planned["stages"][0]["kernel"]: 3}
