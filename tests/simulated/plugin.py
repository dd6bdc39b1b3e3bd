"""`pytest -p tests.simulated.plugin`: the tests of a GPU on devices that are not there."""

from __future__ import annotations

import pytest

from tests.simulated.device import Device, install
from tests.simulated.driver import Log, install_driver

_device = install()
_log = install_driver(_device)


@pytest.fixture
def device() -> Device:
    _device.compute(True)
    _device.clear()
    return _device


@pytest.fixture
def launches() -> Log:
    _log.clear()
    return _log
