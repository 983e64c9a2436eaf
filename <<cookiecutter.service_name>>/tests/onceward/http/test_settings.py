"""The settings of the API: what the guide says of them."""

from pathlib import Path

import settings_guide

from onceward.http.settings import HttpSettings

GUIDE = Path(__file__).parents[3] / "docs" / "http.md"


def test_the_guide_tells_of_every_setting_what_the_code_says() -> None:
    assert settings_guide.table(HttpSettings) in GUIDE.read_text("utf-8"), settings_guide.__doc__
