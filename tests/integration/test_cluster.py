# SPDX-License-Identifier: MIT
"""What docs/ gives to copy: the dashboard asks for metrics that there are, YAML is what its readers expect, and
scripts do what they say."""
import json
import os
import re
import subprocess

import fmhad
import pytest

CLUSTER = fmhad.ROOT / "docs/cluster"
yaml = pytest.importorskip("yaml")


def test_the_dashboard_asks_for_metrics_that_there_are(make_daemon):
    daemon = make_daemon()
    text = subprocess.run([fmhad.find_program("fmhactl"), "metrics", "--socket", daemon.socket], capture_output=True,
                          text=True, check=True).stdout  # fmt: skip
    families = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE "))
    suffixes = {"counter": [""], "gauge": [""], "histogram": ["_bucket"]}
    known = {name + suffix for name, kind in families.items() for suffix in suffixes[kind]}
    dashboard = json.loads((fmhad.ROOT / "docs/grafana/fmhad.json").read_text())
    asked = {name for panel in dashboard["panels"] for target in panel["targets"]
             for name in re.findall(r"fmhad_\w+", target["expr"])}  # fmt: skip
    assert len(asked) >= 15 and asked <= known, asked - known
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in dashboard["panels"]}) == len(places)
    assert set(re.findall(r"fmhad_\w+", (fmhad.ROOT / "docs/watching.md").read_text())) <= known


def test_the_daemon_set_holds_together():
    (document,) = yaml.safe_load_all((CLUSTER / "daemonset.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("apps/v1", "DaemonSet")
    template = document["spec"]["template"]
    assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    for container in template["spec"]["initContainers"] + template["spec"]["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["image"] == "fmhad"


def test_compose_shares_the_sockets_folder():
    document = yaml.safe_load((CLUSTER / "compose.yaml").read_text())
    daemon, client = document["services"]["fmhad"], document["services"]["client"]
    assert "socket:/run/fmhad" in daemon["volumes"] and "socket:/run/fmhad:ro" in client["volumes"]
    assert set(document["volumes"]) == {volume.split(":")[0] for volume in daemon["volumes"]}
    # Its health is what the image says it is.
    assert client["depends_on"]["fmhad"]["condition"] == "service_healthy"
    assert "HEALTHCHECK" in (CLUSTER / "Containerfile").read_text()


def script(name, daemon, path, **variables):
    programs = path / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "logger").write_text(f'#!/bin/sh\necho "$@" >>{path}/logged\n')
    (programs / "logger").chmod(0o755)
    (programs / "pgrep").write_text(f"#!/bin/sh\nexit $(cat {path}/pgrep)\n")
    (programs / "pgrep").chmod(0o755)
    if not (programs / "fmhactl").exists():
        (programs / "fmhactl").symlink_to(fmhad.find_program("fmhactl"))
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "FMHAD_SOCKET": daemon if isinstance(daemon, str) else daemon.socket}
    done = subprocess.run(["sh", CLUSTER / "slurm" / name], capture_output=True, text=True, check=False,
                          env={**environment, **variables})  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout


def test_slurms_prolog(make_daemon, tmp_path):
    daemon = make_daemon()
    assert script("prolog.sh", daemon, tmp_path) == f"export FMHAD_SOCKET={daemon.socket}\n"
    assert script("prolog.sh", str(tmp_path / "none"), tmp_path).startswith("print fmhad does not answer on ")


def test_slurms_epilog(make_daemon, tmp_path):
    daemon = make_daemon()
    job = {"SLURM_JOB_UID": str(os.getuid()), "SLURM_JOB_ID": "7"}
    (tmp_path / "pgrep").write_text("1")
    assert script("epilog.sh", daemon, tmp_path, **job) == "" and not (tmp_path / "logged").exists()
    with daemon.device():
        (tmp_path / "pgrep").write_text("0")  # another job of the user: sessions are its own
        script("epilog.sh", daemon, tmp_path, **job)
        assert not (tmp_path / "logged").exists()
        (tmp_path / "pgrep").write_text("1")
        script("epilog.sh", daemon, tmp_path, **job)
    assert "has sessions after job 7" in (tmp_path / "logged").read_text()


def test_slurms_warm(make_daemon, tmp_path):
    """It says why nothing could be compiled (a CPU's kernels are built in), and never fails; without a model it does nothing."""
    daemon = make_daemon()
    model = tmp_path / "model.json"
    assert script("warm.sh", daemon, tmp_path, FMHAD_WARM=str(model), SLURM_JOB_ID="7") == ""
    assert not (tmp_path / "logged").exists()
    model.write_text('{"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}')
    script("warm.sh", daemon, tmp_path, FMHAD_WARM=str(model), SLURM_JOB_ID="7")
    assert "-t fmhad-warm job 7: fmhactl: " in (tmp_path / "logged").read_text()
    script("warm.sh", str(tmp_path / "none"), tmp_path, FMHAD_WARM=str(model), SLURM_JOB_ID="8")
    assert "job 8" in (tmp_path / "logged").read_text()


def test_the_pages_are_linked_and_their_links_exist():
    readme = (fmhad.ROOT / "README.md").read_text()
    for page in ("docs/watching.md", "docs/scale.md", "docs/cluster/README.md", "CHANGELOG.md"):
        assert f"({page})" in readme
        for link in re.findall(r"\]\(([^)#:]+)\)", (fmhad.ROOT / page).read_text()):
            assert ((fmhad.ROOT / page).parent / link).exists(), (page, link)
