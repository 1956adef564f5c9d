"""The names of ``import quantcore`` are code that documentation tools and type checkers see."""

import inspect
import pydoc
from pathlib import Path

import bitfoundry
import quantcore


def test_documentation_tools_see_every_public_name() -> None:
    text = pydoc.plain(pydoc.render_doc(quantcore))
    classes = [name for name in quantcore.__all__ if inspect.isclass(getattr(quantcore, name))]
    assert len(classes) > 90
    assert [name for name in classes if f"class {name}(" not in text] == []
    functions = [name for name in quantcore.__all__ if inspect.isfunction(getattr(quantcore, name))]
    assert [name for name in functions if f"    {name}(" not in text] == []


def test_every_public_class_is_written_down_in_its_module() -> None:
    """And is not made of strings when it is asked for: its source can be found."""
    for name in quantcore.__all__:
        entry = getattr(quantcore, name)
        if inspect.isclass(entry):
            assert f"class {name}" in inspect.getsource(entry), name


def test_installed_packages_are_typed() -> None:
    for package in (quantcore, bitfoundry):
        assert (Path(package.__path__[0]) / "py.typed").is_file()
