"""Errors: one tree, picklable, with the builtin they replace."""

import inspect
import pickle

import pytest

from sglang_multiturn import errors

ALL = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, errors.SglangMultiturnError)
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_survives_pickling(error: type[errors.SglangMultiturnError]) -> None:
    copy = pickle.loads(pickle.dumps(error("what happened")))
    assert type(copy) is error
    assert str(copy) == "what happened"


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_every_error_is_drawn_in_the_modules_tree(error: type[errors.SglangMultiturnError]) -> None:
    assert error.__name__ in (errors.__doc__ or "")


def test_a_missing_dependency_names_the_pip_command() -> None:
    error = errors.MissingDependencyError.for_extra("the sglang engine", "sglang", "sglang")
    assert isinstance(error, ImportError)
    assert str(error) == (
        "the sglang engine needs sglang, which is not installed: pip install 'sglang_multiturn[sglang]'"
    )
