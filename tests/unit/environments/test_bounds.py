"""Bounds beside the fields of a dataclass, and what is said of a value outside."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from environments.bounds import check_bounds, leaves, setting
from environments.errors import ConfigError


@dataclass
class Wheel:
    spokes: int = setting(3, at_least=1)
    grip: float = setting(0.5, above=0, below=1)
    material: str = setting("steel", one_of=("steel", "oak", "rubber"))


@dataclass
class Cart:
    load: float | None = setting(None, at_least=0, at_most=9)
    slope: float = 0.0
    ratios: list[float] = setting([0.5, 0.5], above=0, length=2)
    wheel: Wheel = field(default_factory=Wheel)


def cart(**changed: object) -> Cart:
    wheel = {name: changed.pop(name) for name in ("spokes", "grip", "material") if name in changed}
    return Cart(**changed, wheel=Wheel(**wheel))


def test_settings_of_tree_are_found_in_order_of_their_fields() -> None:
    found = [(leaf.name, leaf.value, leaf.owner) for leaf in leaves(Cart())]
    assert found == [
        ("load", None, Cart),
        ("slope", 0.0, Cart),
        ("ratios", [0.5, 0.5], Cart),
        ("wheel.spokes", 3, Wheel),
        ("wheel.grip", 0.5, Wheel),
        ("wheel.material", "steel", Wheel),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"load": 0},
        {"load": 9.0},
        {"load": None},
        {"spokes": 10**400},
        {"grip": 1e-9},
        {"material": "oak"},
    ],
)
def test_values_within_their_bounds_pass(changed: dict[str, object]) -> None:
    check_bounds(cart(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"load": -0.1}, r"^load=-0\.1 has to be at least 0 and at most 9\.$"),
        ({"load": 9.1}, r"^load=9\.1 has to be at least 0 and at most 9\.$"),
        ({"load": "heavy"}, r"^load='heavy' has to be a number at least 0"),
        ({"load": True}, r"^load=True has to be a number at least 0"),
        ({"spokes": 0}, r"^wheel\.spokes=0 has to be at least 1\.$"),
        ({"grip": 0.0}, r"^wheel\.grip=0\.0 has to be above 0 and below 1\.$"),
        ({"grip": 1.0}, r"^wheel\.grip=1\.0 has to be above 0 and below 1\.$"),
        ({"grip": math.nan}, r"^wheel\.grip=nan has to be a finite number\.$"),
        ({"slope": math.inf}, r"^slope=inf has to be a finite number\.$"),
        ({"ratios": [1.0, 0.0]}, r"^ratios\[1\]=0\.0 has to be above 0\.$"),
        ({"ratios": [1.0]}, r"^ratios=\[1\.0\] has to be a list of 2\.$"),
        ({"material": "aok"}, r"Did you mean 'oak'\?$"),
        ({"material": "stel"}, r"='stel' is not one of steel, oak, rubber\. Did you mean 'steel'\?$"),
        ({"material": "x"}, r"^wheel\.material='x' is not one of steel, oak, rubber\.$"),
    ],
)
def test_value_outside_is_named_with_its_bound(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_bounds(cart(**changed))


def test_names_begin_with_the_prefix() -> None:
    with pytest.raises(ConfigError, match=r"^cart\.wheel\.spokes=0 "):
        check_bounds(cart(spokes=0), "cart.")


def test_default_of_a_list_belongs_to_one_instance() -> None:
    Cart().ratios.append(1.0)
    assert Cart().ratios == [0.5, 0.5]
