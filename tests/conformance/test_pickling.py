"""Functions and classes sent by file, whether or not their module can be imported by name."""

import importlib.util
import pickle
import subprocess
import sys

import pytest

from polyshard.conformance.ranks import pickling


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Write a module and load it under a name that no import would find."""

    def write_and_load(source, name="no.such.package.test_something"):
        file = tmp_path / "test_something.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return write_and_load


def unpickle_elsewhere(pickled, tmp_path):
    """Return what another process prints that unpickles a value and calls it."""
    file = tmp_path / "value.pickle"
    file.write_bytes(pickled)
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))())"
    return subprocess.run(
        [sys.executable, "-c", program, file], capture_output=True, text=True, check=False
    )


def test_a_module_of_no_importable_name_is_loaded_from_its_file(load, tmp_path):
    module = load("def answer():\n    return 42, __name__\n")
    found = unpickle_elsewhere(pickling.dumps(module.answer), tmp_path)
    assert found.stdout.strip() == "(42, 'no.such.package.test_something')", found.stderr


def test_a_name_that_leads_to_another_file_is_not_followed(load, tmp_path):
    module = load("def loads():\n    return 'ours'\n", name="json")
    found = unpickle_elsewhere(pickling.dumps(module.loads), tmp_path)
    assert found.stdout.strip() == "ours", found.stderr


def test_instances_and_nested_classes_are_found(load, tmp_path):
    source = (
        "class Outer:\n    class Inner:\n        def __call__(self):\n            return 'in'\n"
    )
    module = load(source)
    found = unpickle_elsewhere(pickling.dumps(module.Outer.Inner()), tmp_path)
    assert found.stdout.strip() == "in", found.stderr


def test_what_the_file_fails_to_import_is_the_error(load, tmp_path):
    module = load("def answer():\n    return 42\n")
    pickled = pickling.dumps(module.answer)
    (tmp_path / "test_something.py").write_text("import absent_dependency\n")
    assert "No module named 'absent_dependency'" in unpickle_elsewhere(pickled, tmp_path).stderr


def test_within_one_process_the_very_object_comes_back(load):
    module = load("def answer():\n    return 42\n")
    assert pickle.loads(pickling.dumps(module.answer)) is module.answer
    assert pickle.loads(pickling.dumps(pytest.fixture)) is pytest.fixture
    assert pickle.loads(pickling.dumps([int, len, dict])) == [int, len, dict]


def test_a_scripts_own_function_is_sent_without_running_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from polyshard.conformance.ranks import pickling\n"
        "def answer():\n    return 42, __name__\n"
        "if __name__ == '__main__':\n"
        "    import sys\n"
        "    sys.stdout.buffer.write(pickling.dumps(answer))\n"
    )
    sent = subprocess.run([sys.executable, script], capture_output=True, check=True).stdout
    found = unpickle_elsewhere(sent, tmp_path)
    assert found.stdout.strip() == "(42, '__mp_main__')", found.stderr


@pytest.mark.parametrize("value", [lambda: None, (_ for _ in ())], ids=["lambda", "generator"])
def test_what_cannot_be_sent_is_a_type_error_that_says_what_can(value):
    with pytest.raises(TypeError, match="top level of a module"):
        pickling.dumps(value)
