"""Search spaces: what files may say, what they rule out, and that every refusal explains itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tlxgen import ops, paths
from tlxgen.config import Config, Value
from tlxgen.devices import TARGETS, Gpu
from tlxgen.errors import InvalidConfigError
from tlxgen.ops.base import Resources
from tlxgen.problem import Problem
from tlxgen.space import search_space
from tlxgen.space.constraint import Constraint, Evaluator

H200 = TARGETS["h200"]

#: Where files that matter in one place only begin.
HEAD = "template: tiles\nsummary: s\nparameters: "

TILES = """
    template: tiles
    summary: Tiles through a ring.
    parameters:
      block_m: {choices: [64, 128, 256], why: rows of wgmma}
      block_n: [64, 128, 256]
      stages: [2, 4, 8]
      store: [tma, plain]
      split: [false, true]
    constraints:
      - require: block_m * block_n <= 128 * 256 if store == 'tma' else block_m <= 128
        why: accumulators fit the registers
      - require: not split or M >= 4 * block_m
        why: too small to split
      - require: shared_bytes <= shared_memory_limit
        why: the ring fits
"""


class TileProblem(Problem):
    M: int


class Tiles:
    """As much of an operator as a search space looks at; counts how often its resource model is asked."""

    name = "tiling"
    templates = ("tiles", "plain")
    asked = 0

    def variables(self, problem: TileProblem) -> dict[str, Value]:
        return {"M": problem.M, "even": problem.M % 2 == 0}

    def resources(self, problem: TileProblem, config: Config) -> Resources:
        self.asked += 1
        p = {name: int(value) for name, value in config.params.items() if not isinstance(value, str)}
        ring = p.get("stages", 1) * (p.get("block_m", 0) + p.get("block_n", 0)) * 128
        return Resources(shared_bytes=ring, mbarriers=2 * p.get("stages", 0), threads=384, accumulator_registers=64)


def tiling() -> Any:
    """The operator, to be taken for a complete one."""
    return Tiles()


Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes search-space files where `space` looks for them."""
    monkeypatch.setattr(paths, "SEARCH_SPACES", tmp_path)

    def write(text: str, name: str = "tiles") -> None:
        (tmp_path / "any").mkdir(exist_ok=True)
        (tmp_path / "any" / f"{name}.yaml").write_text(dedent(text))

    return write


@pytest.fixture
def tiles(write: Write) -> Any:
    write(TILES)
    write("template: plain\nsummary: One block.\nparameters: {block: [1, 2]}\n", "plain")
    return tiling()


def one(constraint: str, parameters: str = "{a: [1, 2, 3], b: [1, 2, 3]}") -> str:
    """A file with one constraint."""
    return HEAD + f"{parameters}\nconstraints: [{{require: '{constraint}', why: w}}]\n"


def brute_force(m: int) -> list[Config]:
    """The legal configs of `TILES`, written in Python."""
    names = ("block_m", "block_n", "stages", "store", "split")
    blocks = (64, 128, 256)
    legal = []
    for bm, bn, stages, store, split in itertools.product(blocks, blocks, (2, 4, 8), ("tma", "plain"), (False, True)):
        fits = bm * bn <= 128 * 256 if store == "tma" else bm <= 128
        if fits and (not split or m >= 4 * bm) and stages * (bm + bn) * 128 <= 232_448:
            legal.append(Config(template="tiles", params=dict(zip(names, (bm, bn, stages, store, split), strict=True))))
    return legal


@pytest.mark.parametrize("m", [1, 256, 4096])
def test_legal_configs_are_what_the_constraints_say(tiles: Any, m: int) -> None:
    assert search_space.legal_configs(tiles, TileProblem(M=m), H200, ["tiles"]) == brute_force(m)


def test_all_templates_in_order_and_always_the_same(tiles: Any) -> None:
    legal = search_space.legal_configs(tiles, TileProblem(M=4096), H200)
    assert [c.template for c in legal[-2:]] == ["plain", "plain"]
    assert len(legal) == len(set(legal))
    assert legal == search_space.legal_configs(tiles, TileProblem(M=4096), H200, ("tiles", "plain"))


def test_values_keep_their_types(tiles: Any) -> None:
    config = search_space.legal_configs(tiles, TileProblem(M=4096), H200)[0]
    assert {name: type(value) for name, value in config.params.items()} == {
        "block_m": int, "block_n": int, "stages": int, "store": str, "split": bool
    }  # fmt: skip


def test_legal_and_why_illegal_agree_everywhere(tiles: Any) -> None:
    problem = TileProblem(M=700)
    legal = set(search_space.legal_configs(tiles, problem, H200))
    parameters = search_space.load("tiles").parameters
    for values in itertools.product(*(p.choices for p in parameters.values())):
        config = Config(template="tiles", params=dict(zip(parameters, values, strict=True)))
        assert (search_space.why_illegal(tiles, problem, config, H200) is None) == (config in legal)


GOOD: dict[str, Value] = {"block_m": 128, "block_n": 128, "stages": 2, "store": "tma", "split": False}


@pytest.mark.parametrize(
    ("template", "params", "reason"),
    [
        ("tiles", GOOD, None),
        ("cubes", GOOD, "template 'cubes' is not one of tiling's: tiles, plain"),
        (
            "tiles",
            {**GOOD, "warps": 4},
            "tiles has no parameter 'warps'; it has block_m, block_n, stages, store, split",
        ),
        ("plain", {}, "plain needs parameter 'block'; give all of block"),
        ("plain", {"block": 3}, "plain: block = 3 is not a choice; use one of 1, 2"),
        ("plain", {"block": True}, "plain: block = True is not a choice; use one of 1, 2"),
        ("tiles", {**GOOD, "split": 0}, "tiles: split = 0 is not a choice; use one of False, True"),
        (
            "tiles",
            {**GOOD, "split": True},
            "tiles: not split or M >= 4 * block_m does not hold (M=256, block_m=128, split=True): too small to split",
        ),
        (
            "tiles",
            {**GOOD, "stages": 8},
            "tiles: shared_bytes <= LIMIT does not hold (shared_bytes=262144, LIMIT=232448): the ring fits",
        ),
    ],
)
def test_why_illegal(tiles: Any, template: str, params: dict[str, Value], reason: str | None) -> None:
    found = search_space.why_illegal(tiles, TileProblem(M=256), Config(template=template, params=params), H200)
    assert found == (reason and reason.replace("LIMIT", "shared_memory_limit"))


def test_unknown_templates_are_refused(tiles: Any) -> None:
    with pytest.raises(InvalidConfigError, match="template 'cubes' is not one of tiling's: tiles, plain"):
        search_space.legal_configs(tiles, TileProblem(M=1), H200, ["cubes"])


@pytest.mark.parametrize(
    ("constraint", "legal"),
    [
        ("a in (1, 3) and b not in [1, 2]", [(1, 3), (3, 3)]),
        ("min(a, b) == 2 or max(a, b) - 1 < 1", [(1, 1), (2, 2), (2, 3), (3, 2)]),
        ("ceil_div(M, a) == 4 and b == 1", [(2, 1)]),
        ("a // b + a % b == -1 + 4 and 1 <= a / b < 2", []),
        ("(a == 2) if even else (b == a)", [(1, 1), (2, 2), (3, 3)]),
        ("capability == 90 and sm_count == 132 and a + b == 6", [(3, 3)]),
        ("threads == 384 and mbarriers == 0 and accumulator_registers == 64 and a * b == 1", [(1, 1)]),
        ("False", []),
    ],
)
def test_the_language(write: Write, constraint: str, legal: Sequence[tuple[int, int]]) -> None:
    write(one(constraint))
    configs = search_space.legal_configs(tiling(), TileProblem(M=7), H200, ["tiles"])
    assert [(c.params["a"], c.params["b"]) for c in configs] == list(legal)


@pytest.mark.parametrize(
    "expression",
    ["a.real", "a[0]", "(lambda: a)()", "[x for x in (1,)]", "open(1)", "min(a, key=b)", "a ** b", "a << b", 'f"{a}"',
     "a := 1", "a; b", "", "{1: a}", "min(*[a])", "a is b", "__import__(1)"],
)  # fmt: skip
def test_what_the_language_leaves_out_is_refused_on_loading(expression: str) -> None:
    with pytest.raises(ValueError, match=r"is not an expression|constraints are made of|at least 1 character"):
        Constraint(require=expression, why="w")


def test_unknown_names_are_refused_before_any_config(write: Write) -> None:
    write(one("a <= N"))
    with pytest.raises(InvalidConfigError, match="'a <= N' reads 'N', which is not known; known are M, a, accum"):
        search_space.legal_configs(tiling(), TileProblem(M=1), H200, ["tiles"])


def test_a_parameter_must_not_hide_a_variable(write: Write) -> None:
    write(one("M > 0", parameters="{M: [1]}"))
    with pytest.raises(InvalidConfigError, match="parameter 'M' is also a variable of tiling; rename one"):
        search_space.legal_configs(tiling(), TileProblem(M=1), H200, ["tiles"])


@pytest.mark.parametrize("constraint", ["M % (a - 1) == 0", 'a < even + M * "x"'])
def test_an_expression_without_a_value_is_an_error_of_the_file(write: Write, constraint: str) -> None:
    write(one(constraint))
    with pytest.raises(InvalidConfigError, match=r"search space tiles: .* has no value at M=4, a=1"):
        search_space.legal_configs(tiling(), TileProblem(M=4), H200, ["tiles"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "{a: [1, 2, 1]}", "parameters.a.choices: a choice appears twice"),
        (HEAD + "{a: [1, true]}", "a choice appears twice"),
        (HEAD + "{a: []}", "parameters.a.choices: .*at least 1"),
        (HEAD + "{a: [1.5]}", "parameters.a.choices"),
        (HEAD + "{a: 3}", "parameters.a"),
        (HEAD + "{}", "parameters"),
        (HEAD + "{a: {choices: [1], default: 1}}", "default"),
        (HEAD + "{a: {choices: [1, 2], absent: 3}}", "parameters.a: absent: 3 is not a choice; use one of 1, 2"),
        (HEAD + "{a: {choices: [0, 1], absent: false}}", "absent: False is not a choice; use one of 0, 1"),
        (HEAD + "{a: {choices: [1], absent: [1]}}", "parameters.a.absent"),
        (HEAD + "{a-b: [1]}", "'a-b' is not an identifier"),
        (HEAD + "{if: [1]}", "'if' is not an identifier"),
        (HEAD + "{threads: [1]}", "'threads' has a name that constraints read otherwise"),
        (HEAD + "{a: [1], a: [2]}", "not YAML: key 'a' is given twice"),
        (HEAD + "{a: [1]}\nnotes: x", "notes: Extra inputs"),
        ("template: tiles\nparameters: {a: [1]}", "summary: Field required"),
        (HEAD + "{a: [1]}\nconstraints: [{require: a > 0}]", "constraints.0.why"),
        (HEAD + "{a: [1]}\nconstraints: [{require: a > 0, why: ' '}]", "constraints.0.why"),
        (HEAD + "{a: [1]}\nconstraints: [{require: a >, why: w}]", "not an expression"),
        ("template: other\nsummary: s\nparameters: {a: [1]}", "is for template 'other'; name the file after it"),
        ("- 1", "the file: "),
        ("a: [", "is not YAML"),
    ],
)  # fmt: skip
def test_files_that_break_a_rule(write: Write, text: str, message: str) -> None:
    write(text)
    with pytest.raises(InvalidConfigError, match=rf"search space .*tiles\.yaml.*{message}") as caught:
        search_space.load("tiles")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["missing", "../tiles", ""])
def test_a_template_without_a_file(tiles: Any, template: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"has no search space .*; there are: plain, tiles"):
        search_space.load(template)


def test_loading_is_cached(tiles: Any) -> None:
    assert search_space.load("tiles") is search_space.load("tiles")


def test_spaces_are_frozen(tiles: Any) -> None:
    with pytest.raises(ValueError, match="frozen"):
        search_space.load("tiles").summary = "another"


def test_the_hash_follows_meaning_not_prose(write: Write) -> None:
    def hash_of(text: str, name: str) -> str:
        write(text.replace("template: tiles", f"template: {name}"), name)
        return search_space.Space.model_validate(search_space.load(name).model_dump() | {"template": "same"}).hash

    base = hash_of(TILES, "base")
    assert hash_of(TILES.replace("rows of wgmma", "other words"), "prose") == base
    assert hash_of(TILES.replace("[2, 4, 8]", "[2, 4]"), "fewer") != base
    assert hash_of(TILES.replace("4 * block_m", "2 * block_m"), "looser") != base
    assert search_space.space_hash("base") != search_space.space_hash("prose")  # two templates, whatever they share
    assert len(search_space.space_hash("base")) == 32


def test_the_resource_model_runs_only_for_what_is_left(write: Write) -> None:
    write(TILES)
    operator = tiling()
    search_space.legal_configs(operator, TileProblem(M=64), H200, ["tiles"])
    # no block fits 64 rows four times, so none is split; 8 of 9 tiles fit by TMA, 6 otherwise; three depths
    assert operator.asked == 3 * (8 + 6)
    operator.asked = 0
    search_space.why_illegal(
        operator, TileProblem(M=64), Config(template="tiles", params={**GOOD, "split": True}), H200
    )
    assert operator.asked == 0


def test_pruning_makes_large_products_cheap(write: Write) -> None:
    parameters = ", ".join(f"p{i}: [1, 2, 3, 4, 5, 6, 7, 8]" for i in range(12))  # 7e10 points
    chain = ", ".join(f"{{require: p{i} == p{i + 1}, why: w}}" for i in range(11))
    write(HEAD + f"{{{parameters}}}\nconstraints: [{chain}]\n")
    start = time.perf_counter()
    assert len(search_space.legal_configs(tiling(), TileProblem(M=1), H200, ["tiles"])) == 8
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    ("capability", "limit"), [((9, 0), 232_448), ((8, 0), 166_912), ((8, 9), 101_376), ((7, 0), 49_152)]
)
def test_shared_memory_follows_the_device(write: Write, capability: tuple[int, int], limit: int) -> None:
    write(one(f"shared_memory_limit == {limit} and a == b == 1"))
    gpu = Gpu("other", 100, capability, 1e9, 1e12, 1, {})
    assert len(search_space.legal_configs(tiling(), TileProblem(M=1), gpu, ["tiles"])) == 1


comparisons = st.builds(
    "{} {} {}".format,
    st.sampled_from(["a", "b", "c", "a + b", "a * c", "M", "2"]),
    st.sampled_from(["<", "<=", "==", "!="]),
    st.sampled_from(["a", "b", "c", "b - 1", "3", "M % 3"]),
)
expressions = st.recursive(
    comparisons,
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner)
        | st.builds("(not {})".format, inner)
        | st.builds("({} if {} else {})".format, inner, inner, inner)
    ),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(constraints=st.lists(expressions, max_size=4), m=st.integers(1, 9))
def test_early_pruning_changes_nothing(
    constraints: list[str], m: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the constraints read, the list is that of Python's own evaluation of the full product."""
    monkeypatch.setattr(paths, "SEARCH_SPACES", tmp_path_factory.mktemp("spaces"))
    lines = "".join(f"\n  - {{require: '{text}', why: w}}" for text in constraints) or " []"
    text = HEAD + f"{{a: [1, 2, 3], b: [1, 2], c: [0, 4]}}\nconstraints:{lines}\n"
    (paths.SEARCH_SPACES / "any").mkdir()
    (paths.SEARCH_SPACES / "any" / "tiles.yaml").write_text(text)
    legal = search_space.legal_configs(tiling(), TileProblem(M=m), H200, ["tiles"])
    expected = [
        values
        for values in itertools.product((1, 2, 3), (1, 2), (0, 4))
        if all(eval(text, {"M": m, **dict(zip("abc", values, strict=True))}) for text in constraints)
    ]
    assert [tuple(config.params.values()) for config in legal] == expected


def test_an_evaluator_returns_the_first_of_several() -> None:
    constraints = [Constraint(require=f"x < {limit}", why="w") for limit in (9, 5, 3)]
    assert Evaluator("t").first_violated(constraints, {"x": 4}) is constraints[2]
    assert Evaluator("t").first_violated(constraints, {"x": 7}) is constraints[1]
    assert Evaluator("t").first_violated(constraints, {"x": 1}) is None


@pytest.mark.parametrize("path", sorted(paths.SEARCH_SPACES.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_shipped_spaces_load(path: Path) -> None:
    assert search_space.load(path.stem).parameters


def test_a_shipped_space_binds_to_its_operator() -> None:
    operator = ops.get("vector_add")
    legal = search_space.legal_configs(operator, operator.problem((1 << 24,)), H200)
    assert {config.template for config in legal} == set(operator.templates)
