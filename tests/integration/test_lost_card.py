# SPDX-License-Identifier: MIT
"""A card that is lost for good: its slot says so, the others keep their cards though the driver numbers them anew."""
import os
import signal

import fmha_wire
import fmhad
import pytest
from test_gpu_layer import compiler, run_once, stub_folder  # noqa: F401

BUSES = (0x1B, 0x3A, 0x5D)


def address(bus):
    return f"0000:{bus:02x}:00.0"


@pytest.fixture
def cards(tmp_path):
    path = tmp_path / "cards"

    def show(*buses):
        path.write_text("".join(f"{bus}\n" for bus in buses))

    show(*BUSES)
    show.path = path
    return show


@pytest.fixture
def make(make_daemon, compiler, cards, tmp_path):  # noqa: F811
    def make(*devices):
        config = {"devices": [{"backend": "cuda", "stall_ms": 600, **device} for device in devices],
                  "compile": {"helper": str(compiler.path), "cache": str(tmp_path / "cache")},
                  "supervision": {"restart_ms": 10}}
        return make_daemon(config, env={**os.environ, "LD_LIBRARY_PATH": str(stub_folder()), "CUDA_STUB_CARDS": str(cards.path)})

    return make


def device_of(daemon, index):
    return daemon.status()["devices"][index]


def kill(daemon, index, wanted):
    before = device_of(daemon, index)["starts"]
    os.kill(daemon.worker_pid(index), signal.SIGKILL)
    assert fmhad.until(lambda: device_of(daemon, index)["starts"] > before and device_of(daemon, index)["state"] == wanted)


def test_the_others_keep_their_cards(make, cards):
    daemon = make(*({"index": i} for i in range(3)))
    assert [device_of(daemon, i)["pci"] for i in range(3)] == [address(bus) for bus in BUSES]
    other = daemon.device(2)
    cards(BUSES[0], BUSES[2])
    kill(daemon, 1, "failed")
    assert address(BUSES[1]) in device_of(daemon, 1)["last_death"]
    assert run_once(other), "a client of another card was disturbed"
    with pytest.raises(fmha_wire.WireError) as refused:
        daemon.device(1)
    assert refused.value.name == "EDEVICE" and address(BUSES[1]) in str(refused.value)
    kill(daemon, 2, "ready")  # the driver's number 2 is no card any more, and 1 is this one
    assert device_of(daemon, 2)["pci"] == address(BUSES[2])
    assert run_once(daemon.device(2))
    cards(*BUSES)  # it was seated again
    assert fmhad.until(lambda: device_of(daemon, 1)["state"] == "ready")
    assert device_of(daemon, 1)["pci"] == address(BUSES[1])


def test_an_address_goes_before_a_number(make):
    daemon = make({"pci": address(BUSES[2])}, {"pci": address(BUSES[0]).upper()})
    assert [device_of(daemon, i)["pci"] for i in range(2)] == [address(BUSES[2]), address(BUSES[0])]


def test_an_address_of_no_card_is_named(make):
    daemon = make({"index": 0}, {"pci": "0000:77:00.0"})
    assert fmhad.until(lambda: device_of(daemon, 1)["state"] == "failed")
    assert "pci 0000:77:00.0" in device_of(daemon, 1)["last_death"] and "3 devices" in device_of(daemon, 1)["last_death"]
    assert device_of(daemon, 0)["state"] == "ready"
