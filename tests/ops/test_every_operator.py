"""Tests derived from what operators declare: emission, compilation, simulation, keys, labels, command line."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tlxgen import ops
from tlxgen.cli.app import app
from tlxgen.cli.problem_options import parse
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.db.record import tuning_key
from tlxgen.devices import target
from tlxgen.errors import CompileError
from tlxgen.ops.command_line import command
from tlxgen.problem import Problem
from tlxgen.simulator.check import check
from tlxgen.space import search_space
from tlxgen.space.candidates import candidates
from tlxgen.tuner.compile_pool import CompilePool

H200 = target("h200")

EXAMPLES: list[Any] = [
    pytest.param(ops.get(name).problem(fields), id=ops.get(name).problem(fields).label)
    for name in ops.NAMES
    for fields in ops.get(name).examples
]
TEMPLATES = [(name, template) for name in ops.NAMES for template in ops.get(name).templates]


def favourites(problem: Problem) -> list[Config]:
    """The best config of each template that has a legal one."""
    best: dict[str, Config] = {}
    for config in candidates(problem, H200):
        best.setdefault(config.template, config)
    return list(best.values())


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_every_template_is_legal_for_an_example(name: str, template: str) -> None:
    legal = [
        config
        for fields in ops.get(name).examples
        for config in search_space.legal_configs(ops.get(name), ops.get(name).problem(fields), H200, (template,))
    ]
    assert legal, f"no example of {name} exercises {template}; add one to its `examples`"


@pytest.mark.parametrize("problem", EXAMPLES)
def test_an_emitted_file_is_python_with_the_promised_names(problem: Problem) -> None:
    for config in favourites(problem):
        tree = ast.parse(emit(ops.get(problem.operator), problem, config).text)
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {"kernel", "arguments", "launch", "check"} <= names, config.template


@pytest.mark.parametrize("problem", EXAMPLES)
def test_it_compiles_within_its_resources(problem: Problem, compile_pool: CompilePool) -> None:
    operator = ops.get(problem.operator)
    binaries = {config: compile_pool.submit(emit(operator, problem, config)) for config in favourites(problem)}
    for config, binary in binaries.items():
        error = binary.exception()
        if error is not None:  # the tuner passes over what spills; another template must be left
            assert isinstance(error, CompileError)
            assert error.kind == "rejected", f"{config.short}: {error}"
            continue
        facts, resources = binary.result().facts, operator.resources(problem, config)
        if resources.mbarriers:  # what the resource model bounds; plain Triton allocates by itself
            assert facts.shared_bytes <= resources.shared_bytes, config.short
    assert any(binary.exception() is None for binary in binaries.values())


@pytest.mark.parametrize("problem", EXAMPLES)
def test_the_simulator_finds_nothing(problem: Problem) -> None:
    for config in favourites(problem):
        report = check(emit(ops.get(problem.operator), problem, config), 2, stop_early=True)
        assert report.clean, f"{config.short}: {report.findings[0].message}"


@pytest.mark.parametrize("problem", EXAMPLES)
def test_every_field_is_part_of_the_key(problem: Problem) -> None:
    key = tuning_key(problem, H200.key)
    assert set(key.problem) == set(type(problem).model_fields)
    grown = problem.model_copy(update={problem.sizes[0]: getattr(problem, problem.sizes[0]) + 1})
    assert tuning_key(grown, H200.key).id != key.id


@pytest.mark.parametrize("problem", EXAMPLES)
def test_label_and_command_line_lead_back_to_the_problem(problem: Problem) -> None:
    assert type(problem).from_label(problem.label) == problem
    done = CliRunner().invoke(app, [*command("show", problem).split()[1:], "--target", "h200", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["problem"] == problem.model_dump()


@pytest.mark.parametrize("name", ops.NAMES)
def test_the_command_line_offers_every_field(name: str) -> None:
    problem_type = ops.get(name).problem_type
    fields = set(problem_type.model_fields) - set(problem_type.sizes)
    text = CliRunner().invoke(app, ["show", "--help"], env={"COLUMNS": "200"}).output
    assert all(f"--{field.replace('_', '-')} " in text for field in fields)
    assert all(problem_type.model_fields[field].description for field in fields), "each option needs a help text"


@pytest.mark.parametrize("problem", EXAMPLES)
def test_the_peer_agrees_with_the_reference(problem: Problem) -> None:
    """On a small case, on the CPU: an error of the reference would be found in no kernel."""
    operator = ops.get(problem.operator)
    for case in operator.small_cases(problem, favourites(problem)[-1])[:2]:
        inputs = operator.inputs(case.problem, "cpu", 0)
        expected, found = operator.reference(case.problem, inputs), operator.eager(case.problem, inputs)
        defined = ~expected.isnan()  # rows that no expert owns have no value
        wrong = (found.double() - expected)[defined].abs().max()
        assert wrong <= 0.05 * expected[defined].abs().max().clamp(min=1.0)
        assert (tuple(found.shape), found.dtype) == operator.output_like(case.problem)
        assert operator.check_call(case.problem, inputs) is None


def test_parse_takes_sizes_as_words() -> None:
    assert parse("gemm", ["8", "16", "32"], {"dtype": "fp16"}) == ops.get("gemm").problem((8, 16, 32), dtype="fp16")
