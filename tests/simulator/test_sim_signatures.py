# Copyright The jax_nki3d Authors.
# SPDX-License-Identifier: Apache-2.0
"""The simulator's signatures equal the recorded API of NKI 0.6.0 in names, order and defaults.

The record is `nki3d/nki_api.json`; its `source` entry says where the facts were read.
"""

import enum
import inspect
import json
from importlib import resources

import numpy as np
import pytest

import nki3d.simulator as nki

RECORD = json.loads(resources.files("nki3d").joinpath("nki_api.json").read_text(encoding="utf-8"))
MODULES = {"nki": nki, "nki.isa": nki.isa, "nki.language": nki.language}
NAMES = {name: value for module in (nki.isa, nki.language) for name, value in vars(module).items()}

# What the simulator leaves out. A name that disappears from the simulator, or is added to it, must be added or removed here.
NOT_IMPLEMENTED = {
    "nki": set(),
    "nki.isa": {
        "dropout",
        "local_gather",
        "nc_matmul_mx",
        "quantize_mx",
        "rand2",
        "rand_get_state",
        "rand_set_state",
        "rng",
        "sequence_bounds",
        "set_rng_seed",
        "topk",
    },
    "nki.language": {"dropout", "rand", "random_seed"},
}

# Classes of the record whose constructor says more here: positional fields, which the language guide promises for kernel classes.
OWN_CONSTRUCTORS = {"NKIObject", "_TileSize"}


def implemented(module):
    return [name for name in RECORD["modules"][module]["functions"] if name not in NOT_IMPLEMENTED[module]]


def written_default(text):
    """The value of a default as the record spells it."""
    if text == "...":
        return ...
    return eval(text, {"__builtins__": {}}, dict(NAMES))


def parameters(function):
    found = []
    for parameter in inspect.signature(function).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        assert parameter.kind is not parameter.KEYWORD_ONLY, "NKI's parser knows no keyword-only parameters"
        found.append((star + parameter.name, parameter.default))
    return found


def compare(function, recorded):
    found = parameters(function)
    assert [name for name, _ in found] == [name for name, _ in recorded]
    for (name, default), (_, text) in zip(found, recorded, strict=True):
        if text is None:
            assert default is inspect.Parameter.empty, name
        else:
            expected = written_default(text)
            assert default == expected, name
            assert type(default) is type(expected), name


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MODULES for name in implemented(module)])
def test_a_function_has_the_recorded_parameters(module, name):
    compare(getattr(MODULES[module], name), RECORD["modules"][module]["functions"][name])


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MODULES for name in sorted(NOT_IMPLEMENTED[module])])
def test_what_is_left_out_raises_with_its_name(module, name):
    assert name in RECORD["modules"][module]["functions"], "not a function of NKI 0.6"
    assert name not in vars(MODULES[module]), "is implemented: take it off the list"
    with pytest.raises(NotImplementedError, match=rf"\b{name}\b"):
        getattr(MODULES[module], name)()


@pytest.mark.parametrize("name", RECORD["modules"]["nki.collectives"]["functions"])
def test_collectives_raise_with_their_name(name):
    with pytest.raises(NotImplementedError, match=rf"\b{name}\b"):
        getattr(nki.collectives, name)()


@pytest.mark.parametrize("name", sorted(RECORD["modules"]["nki.language"]["classes"]["NkiTensor"]["methods"]))
def test_a_method_of_nki_tensor_has_the_recorded_parameters(name):
    compare(getattr(nki.language.NkiTensor, name), RECORD["modules"]["nki.language"]["classes"]["NkiTensor"]["methods"][name])


def test_nki_tensor_has_the_recorded_attributes():
    seen = {}

    @nki.jit
    def kernel(x):
        for name in RECORD["modules"]["nki.language"]["classes"]["NkiTensor"]["attributes"]:
            seen[name] = getattr(x, name)

    kernel(np.zeros((2, 3), np.float32))
    assert seen["shape"] == (2, 3)
    assert seen["strides"] == (3, 1)
    assert (seen["offset"], seen["dtype"], seen["ndim"], seen["size"]) == (0, "float32", 2, 6)
    assert callable(seen["reinterpret_cast"])


@pytest.mark.parametrize("module", ["nki.isa", "nki.language"])
def test_enumerations_have_the_recorded_members(module):
    for name, members in RECORD["modules"][module]["enums"].items():
        found = getattr(MODULES[module], name)
        assert issubclass(found, enum.Enum)
        assert {member.name: member.value for member in found} == members, name


@pytest.mark.parametrize("module", ["nki.isa", "nki.language"])
def test_constants_exist(module):
    for name in RECORD["modules"][module]["constants"]:
        assert name in vars(MODULES[module]), name


def test_tile_size_has_the_recorded_names():
    recorded = RECORD["modules"]["nki.language"]["classes"]["_TileSize"]
    for name in [*recorded["attributes"], *recorded["properties"]]:
        assert getattr(nki.language.tile_size, name) > 0, name


def test_classes_exist():
    for module in ("nki.isa", "nki.language"):
        for name in set(RECORD["modules"][module]["classes"]) - OWN_CONSTRUCTORS:
            assert inspect.isclass(getattr(MODULES[module], name)), name
    for name in ("NkiInstruction", "VirtualRegister"):
        for method, recorded in RECORD["modules"]["nki.isa"]["classes"][name]["methods"].items():
            compare(getattr(getattr(nki.isa, name), method), recorded)


def test_a_difference_is_found():
    def memset(dst, value, engine=nki.isa.engine.vector, name=None): ...

    with pytest.raises(AssertionError):
        compare(memset, RECORD["modules"]["nki.isa"]["functions"]["memset"])
