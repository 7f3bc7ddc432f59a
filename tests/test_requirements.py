"""An installation by pip has everything that a checkout has."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent


def names_in(text: str) -> set[str]:
    """Names of the packages at the beginning of lines."""
    return {
        name.lower().replace("_", "-") for name in re.findall(r'^\s*"?([A-Za-z][\w.-]*)(?:\[[^]]*])?[><=]=', text, re.M)
    }


def test_the_extras_require_every_package_of_the_lock_file_but_those_of_tests():
    pinned = names_in((ROOT / "requirements.txt").read_text().split("# Tests and lint")[0])
    metadata = re.sub(r'(, )(?=")', ",\n", (ROOT / "pyproject.toml").read_text()).replace("[", "[\n")
    required = names_in(metadata)
    assert {"tensorflow-cpu", "tensorboard", "keras-cv"} <= pinned
    assert pinned - required == {"h5py"}  # keras requires it
