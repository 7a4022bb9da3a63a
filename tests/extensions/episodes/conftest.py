import pytest

from grpojax import extension
from grpojax.extensions.episodes.environment_config import EnvironmentConfig
from grpojax.extensions.episodes.instances import Workers


@pytest.fixture
def start():
    """Starts the environments of a section's settings; a test starts one or more, and they are ended after it."""
    started = []

    def make(name=None, **settings):
        settings = {"format": "hermes", "workers": 1, **settings}
        if name is not None:
            settings["name"] = (
                name if ":" in name or name in extension.words("environments") else f"environment_classes:{name}"
            )
        started.append(Workers(EnvironmentConfig(**settings)))
        return started[-1]

    yield make
    for workers in started:
        workers.close()
