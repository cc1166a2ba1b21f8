"""Headless Chromium for tests of pages."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
FLAGS = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
FLAGS += "disable-component-update disable-sync hide-scrollbars force-prefers-reduced-motion"


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """Start Chromium with an empty profile, or skip the test if it or its driver is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = next((path for path in CHROMIUM if Path(path).exists()), None) or shutil.which("chromium")
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS.split():
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield session
    finally:
        session.quit()


def set_screen(browser: Any, width: int = 1280, scheme: str = "light") -> None:
    """Set the width of the screen, a phone's below 600, and the preferred color scheme."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    wish = {"media": "", "features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)


def until(condition: Callable[[], Any], what: str, seconds: float = 300) -> Any:
    """Wait for a condition. The limit only ends a hopeless wait: an idle machine needs a second."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)
    return found
