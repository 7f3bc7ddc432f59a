"""An installation by pip has everything that a checkout has."""

import ast
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


def test_the_package_data_are_all_files_that_are_no_modules():
    (patterns,) = re.findall(r'^"\*" = (\[.*\])$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    files = [path for package in ("keras_vit", "training", "export") for path in (ROOT / package).rglob("*.*")]
    data = [path for path in files if path.suffix not in (".py", ".pyc") and path.is_file()]
    packages = {path.parent for path in files if path.name == "__init__.py"}
    for path in data:
        package = next(parent for parent in path.parents if parent in packages)
        assert any(path.relative_to(package).match(pattern) for pattern in ast.literal_eval(patterns)), path
    assert any(path.suffix == ".css" for path in data)
