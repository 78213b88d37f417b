"""Search spaces: a template's parameters, their choices, and which combinations are legal (`why_illegal`).

`search_spaces/<operator>/<template>.yaml` lists parameters, choices and constraints, each constraint with its reason.
Constraints are expressions (`tlxgen.space.constraint`) over the config's parameters, the operator's variables of the
problem, the device and the resources of one CTA. Legal configs are enumerated, so a search proposes nothing illegal.
"""

from __future__ import annotations

import hashlib
import json
import keyword
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from tlxgen import paths
from tlxgen.config import Config, Value
from tlxgen.devices import Gpu
from tlxgen.errors import InvalidConfigError
from tlxgen.ops.base import Operator, Resources
from tlxgen.problem import Problem
from tlxgen.space.constraint import FUNCTIONS, Constraint, Evaluator

DEVICE_NAMES = frozenset({"sm_count", "shared_memory_limit", "capability"})
RESOURCE_NAMES = frozenset(field.name for field in fields(Resources))

#: Bytes of shared memory that one CTA can have, by compute capability (CUDA C++ Programming Guide, technical
#: specifications per compute capability). Others get the 48 KB that every GPU has.
_SHARED_KB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
_SHARED_KB_EVERYWHERE = 48


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


class Parameter(_Strict):
    """The choices of one parameter, in the order of enumeration.

    Attributes:
        choices: the values.
        why: what they mean.
        absent: the choice of configs that were stored before the parameter existed (`tlxgen.space.absent`).
    """

    choices: tuple[StrictBool | StrictInt | StrictStr, ...] = Field(min_length=1)
    why: str = ""
    absent: StrictBool | StrictInt | StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, data: Any) -> Any:
        return {"choices": data} if isinstance(data, list) else data

    @field_validator("choices")
    @classmethod
    def _no_twins(cls, choices: tuple[Value, ...]) -> tuple[Value, ...]:
        if len(set(choices)) < len(choices):  # 1 and true are twins too: expressions could not tell them apart
            raise ValueError(f"a choice appears twice in {list(choices)}; name each value once")
        return choices

    @model_validator(mode="after")
    def _absent_is_a_choice(self) -> Parameter:
        if self.absent is not None and not self.allows(self.absent):
            raise ValueError(f"absent: {self.absent!r} is not a choice; use one of {self.listed}")
        return self

    @property
    def listed(self) -> str:
        """The choices, in one line."""
        return ", ".join(map(str, self.choices))

    def allows(self, value: Value) -> bool:
        """Whether `value` is a choice; `True` is not the choice 1."""
        return any(type(value) is type(choice) and value == choice for choice in self.choices)


class Space(_Strict):
    """A template's parameters, in the order of enumeration, and constraints.

    Attributes:
        retired: removed parameters → the value that the template now always has (`tlxgen.space.absent`).
    """

    template: str
    summary: str = Field(min_length=1)
    parameters: dict[str, Parameter] = Field(min_length=1)
    retired: dict[str, StrictBool | StrictInt | StrictStr] = {}
    constraints: tuple[Constraint, ...] = ()

    @field_validator("parameters")
    @classmethod
    def _names(cls, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
        reserved = DEVICE_NAMES | RESOURCE_NAMES | FUNCTIONS.keys()
        for name in parameters:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"parameter {name!r} is not an identifier; constraints could not name it")
            if name in reserved:
                raise ValueError(f"parameter {name!r} has a name that constraints read otherwise; rename it")
        return parameters

    @model_validator(mode="after")
    def _retired_are_no_parameters(self) -> Space:
        if both := self.retired.keys() & self.parameters.keys():
            raise ValueError(f"retired: {min(both)!r} is still a parameter; remove it from one of the two")
        return self

    @cached_property
    def absent(self) -> dict[str, Value]:
        """Values of parameters in configs that were stored before the parameters existed, by name."""
        return {name: p.absent for name, p in self.parameters.items() if p.absent is not None}

    @cached_property
    def cheap(self) -> tuple[Constraint, ...]:
        """The constraints that need no resource model."""
        return tuple(c for c in self.constraints if not c.names & RESOURCE_NAMES)

    @cached_property
    def costly(self) -> tuple[Constraint, ...]:
        """The constraints that need the resource model: evaluated last, for complete configs only."""
        return tuple(c for c in self.constraints if c.names & RESOURCE_NAMES)

    @cached_property
    def hash(self) -> str:
        """Hash (32 hex digits) of choices and constraints, without texts for people."""
        choices = {name: parameter.choices for name, parameter in self.parameters.items()}
        canonical = json.dumps([self.template, choices, [c.require for c in self.constraints]], separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def load(template: str) -> Space:
    """The search space of a template; cached.

    Raises:
        InvalidConfigError: there is none, or its file is invalid; the message names file, place and rule.
    """
    return _load(paths.SEARCH_SPACES, template)


def space_hash(template: str) -> str:
    """See `Space.hash`: equal hashes mean equal legal configs for equal problems, operators and devices."""
    return load(template).hash


def legal_configs(
    operator: Operator[Any], problem: Problem, gpu: Gpu, templates: Sequence[str] | None = None
) -> list[Config]:
    """Every legal config of the operator's templates (or of `templates`), in the order of templates and files.

    Raises:
        InvalidConfigError: a template that the operator does not have, or a search space that breaks a rule.
    """
    chosen = operator.templates if templates is None else templates
    for template in chosen:
        if template not in operator.templates:
            raise InvalidConfigError(_unknown_template(operator, template))
    return [config for template in chosen for config in _Scope.of(operator, problem, gpu, template).configs()]


def why_illegal(operator: Operator[Any], problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """The first reason why a config is illegal for a problem on a GPU, in one line, or None.

    Raises:
        InvalidConfigError: the template's search space breaks a rule.
    """
    return why_outside(operator, config) or _Scope.of(operator, problem, gpu, config.template).violation(config)


def why_outside(operator: Operator[Any], config: Config) -> str | None:
    """Why a config is in none of the operator's search spaces, for any problem and device, or None.

    Raises:
        InvalidConfigError: the template's search space breaks a rule.
    """
    if config.template not in operator.templates:
        return _unknown_template(operator, config.template)
    return _misfit(load(config.template), config)


def _unknown_template(operator: Operator[Any], template: str) -> str:
    return f"template {template!r} is not one of {operator.name}'s: {', '.join(operator.templates)}"


def _misfit(space: Space, config: Config) -> str | None:
    """Unknown, missing or impossible parameters of a config; constraints are not evaluated."""
    parameters, given = space.parameters, config.params
    known = ", ".join(parameters)
    for name, value in given.items():
        if name in space.retired:
            left = space.retired[name]
            return (
                f"{config.template}: {name} = {value!r} was removed; kernels now have {name} = {left!r}, leave it out"
            )
        if name not in parameters:
            return f"{config.template} has no parameter {name!r}; it has {known}"
    for name, parameter in parameters.items():
        if name not in given:
            return f"{config.template} needs parameter {name!r}; give all of {known}"
        if not parameter.allows(given[name]):
            return f"{config.template}: {name} = {given[name]!r} is not a choice; use one of {parameter.listed}"
    return None


@dataclass(frozen=True)
class _Scope:
    """A search space bound to a problem and a device."""

    space: Space
    constants: Mapping[str, Value]
    resources: Callable[[Config], Resources]

    @classmethod
    def of(cls, operator: Operator[Any], problem: Problem, gpu: Gpu, template: str) -> _Scope:
        """The scope of one template; checks that every name in its constraints is known and unambiguous."""
        space = load(template)
        variables = operator.variables(problem)
        constants = {**variables, **_device_values(gpu)}
        if clash := space.parameters.keys() & constants.keys():
            raise InvalidConfigError(
                f"search space {template}: parameter {min(clash)!r} is also a variable of {operator.name}; rename one"
            )
        known = space.parameters.keys() | constants.keys() | RESOURCE_NAMES
        for constraint in space.constraints:
            if unknown := constraint.names - known:
                raise InvalidConfigError(
                    f"search space {template}: {constraint.require!r} reads {min(unknown)!r}, which is not known; "
                    f"known are {', '.join(sorted(known))}"
                )
        return cls(space, constants, lambda config: operator.resources(problem, config))

    def configs(self) -> Iterator[Config]:
        """Every legal config, in the order of `itertools.product` over the parameters' choices."""
        names = list(self.space.parameters)
        # A constraint is evaluated as soon as its last parameter has a value, which prunes the enumeration.
        levels: list[list[Constraint]] = [[] for _ in range(len(names) + 1)]
        for constraint in self.space.cheap:
            levels[max((names.index(n) + 1 for n in constraint.names if n in names), default=0)].append(constraint)
        evaluator = Evaluator(self.space.template)
        values: dict[str, Any] = dict(self.constants)  # and of the parameters assigned so far

        def extend(turn: int) -> Iterator[Config]:
            if evaluator.first_violated(levels[turn], values):
                return
            if turn < len(names):
                name = names[turn]
                for choice in self.space.parameters[name].choices:
                    values[name] = choice
                    yield from extend(turn + 1)
                return
            config = Config(template=self.space.template, params={name: values[name] for name in names})
            costly = self.space.costly
            if not costly or not evaluator.first_violated(costly, self._all_values(config)):
                yield config

        return extend(0)

    def violation(self, config: Config) -> str | None:
        """The first violated constraint, with its values and reason."""
        evaluator = Evaluator(self.space.template)
        values: dict[str, Any] = {**self.constants, **config.params}
        broken = evaluator.first_violated(self.space.cheap, values)
        if broken is None and self.space.costly:
            values = self._all_values(config)
            broken = evaluator.first_violated(self.space.costly, values)
        if broken is None:
            return None
        return f"{config.template}: {broken.require} does not hold ({broken.shown(values)}): {broken.why}"

    def _all_values(self, config: Config) -> dict[str, Any]:
        return {**self.constants, **config.params, **vars(self.resources(config))}


def _device_values(gpu: Gpu) -> dict[str, Value]:
    major, minor = gpu.capability
    capability = 10 * major + minor
    limit = _SHARED_KB.get(capability, _SHARED_KB_EVERYWHERE)
    return {"sm_count": gpu.sm_count, "capability": capability, "shared_memory_limit": limit << 10}


if TYPE_CHECKING:
    _Safe = yaml.SafeLoader
else:  # libyaml's if PyYAML has it: eight times as fast, and a kernel without a row reads four files
    _Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):
    """Safe YAML loader that refuses duplicate keys, which PyYAML would silently overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        if twins := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"key {min(twins)!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


@cache
def _load(directory: Path, template: str) -> Space:
    path = paths.in_operator_folder(directory, f"{template}.yaml") if template.isidentifier() else None
    if path is None:
        known = ", ".join(sorted(file.stem for file in directory.glob("*/*.yaml")))
        raise InvalidConfigError(
            f"template {template!r} has no search space {directory}/*/{template}.yaml; there are: {known or 'none'}"
        )
    try:
        space = Space.model_validate(yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader))  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise InvalidConfigError(f"search space {path} is not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise InvalidConfigError(f"search space {path}: {_one_line(error)}") from None
    if space.template != template:
        raise InvalidConfigError(f"search space {path} is for template {space.template!r}; name the file after it")
    return space


def _one_line(error: ValidationError) -> str:
    """The first error, such as `constraints.0.why: Field required`."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the file"
    return f"{place}: {str(first['msg']).removeprefix('Value error, ')}"
