"""Searches over tables of times: every candidate once, resumption, learning from times and failures."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlxgen.config import Config, Value
from tlxgen.errors import InvalidConfigError, ToolchainError
from tlxgen.tuner.search import (
    SEARCHES,
    ExhaustiveSearch,
    OptunaSearch,
    Search,
    _Grid,
    default_warm,
    effective_sampler,
    make_search,
)

#: Microseconds of each config, None for one that does not run.
Table = dict[Config, float | None]

SAMPLERS = ("tpe", "qmc", "gp")


def gemm_like(blocks: tuple[int, ...] = (64, 128, 192, 256)) -> Table:
    """About 600 configs of two templates that share most parameters, with one optimum and failing regions."""
    table: Table = {}
    templates, depths, groups, splits = ("pingpong", "pipelined"), (2, 3, 4, 6), (1, 8), (False, True)
    knobs = itertools.product(templates, blocks, blocks, (32, 64, 128), depths, groups, splits)
    for template, m, n, k, stages, group, split in knobs:
        if m * n > 128 * 256 or 2 * stages * k * (m + n) > 200_000 or (template == "pipelined" and split):
            continue
        params: dict[str, Value] = {"block_m": m, "block_n": n, "block_k": k, "num_stages": stages, "group_m": group}
        if template == "pingpong":
            params["split"] = split
        config = Config(template=template, params=params)
        slow = 0.5 * abs(math.log2(m / 128)) + 0.3 * abs(math.log2(n / 256)) + 0.1 * abs(math.log2(k / 64))
        slow += 0.06 * abs(stages - 4) + 0.02 * (group == 1) + 0.03 * split + 0.15 * (template == "pipelined")
        noise = 0.01 * random.Random(config.id).random()
        fails = stages == 6 or (m == 192 and template == "pingpong")
        table[config] = None if fails else 100 * (1 + slow + noise)
    return table


def shuffled(table: Table, seed: int) -> list[Config]:
    """The table's configs in random order."""
    return random.Random(seed).sample(list(table), len(table))


def replay(search: Search, table: Table, budget: int, batch: int = 1) -> Iterator[Config]:
    """Proposes and observes batches, as the tuner does, until the budget or the list is used up."""
    while budget > 0 and (configs := search.propose(min(batch, budget))):
        for config in configs:
            yield config
            search.observe(config, table[config])
        budget -= len(configs)


def regret(name: str, table: Table, budget: int, seed: int) -> float:
    tried = list(replay(make_search(name, shuffled(table, seed), seed), table, budget))
    reached = min((t for c in tried if (t := table[c]) is not None), default=math.inf)
    return reached / min(t for t in table.values() if t is not None) - 1


TABLE = gemm_like()
SMALL: Table = {
    Config(template=t, params={"block": b, "wide": w}): None if b == 3 else b * (1.5 if w else 1.0)
    for t, b, w in itertools.product("ab", (1, 2, 3, 4, 8), (False, True))
}


def test_table_has_enough_configs_and_failures() -> None:
    assert 500 < len(TABLE) < 700
    assert 0.1 < sum(t is None for t in TABLE.values()) / len(TABLE) < 0.5


@pytest.mark.parametrize("name", SEARCHES)
def test_untried_configs_are_proposed_once(name: str) -> None:
    """Whatever is listed twice, observed before, observed twice, or unknown."""
    search = make_search(name, [*SMALL, *SMALL], seed=0)
    earlier = list(SMALL)[1::3]
    for config in [*earlier, earlier[0]]:
        search.observe(config, SMALL[config])
    search.observe(Config(template="gone", params={"old": 1}), 5.0)
    tried = list(replay(search, SMALL, budget=10 * len(SMALL), batch=3))
    assert len(tried) == len(set(tried))
    assert set(tried) == set(SMALL) - set(earlier)
    assert search.propose(5) == []


@pytest.mark.parametrize("name", ["tpe", "random", "exhaustive", "qmc"])
@pytest.mark.parametrize("batch", [1, 7])
def test_keeps_the_budget_without_repeats(name: str, batch: int) -> None:
    tried = list(replay(make_search(name, list(TABLE), seed=1), TABLE, budget=60, batch=batch))
    assert len(tried) == len(set(tried)) == 60
    assert set(tried) <= set(TABLE)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("candidates", [[], [Config(template="a", params={"block": 1})], list(SMALL)])
def test_pending_configs_are_not_proposed_again(name: str, candidates: list[Config]) -> None:
    search = make_search(name, candidates, seed=0)
    assert search.propose(0) == search.propose(-1) == []
    assert sorted(config.id for config in search.propose(1000)) == sorted(config.id for config in candidates)
    assert search.propose(1) == []


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("time_us", [0.0, -1.0, math.nan, math.inf])
def test_invalid_times_are_refused(name: str, time_us: float) -> None:
    search = make_search(name, list(SMALL), seed=0)
    with pytest.raises(ValueError, match=r"time_us = .* is not a positive time; pass None"):
        search.observe(next(iter(SMALL)), time_us)


@pytest.mark.parametrize("name", ["tpe", "random", "qmc"])
def test_proposals_depend_on_the_seed_only(name: str) -> None:
    runs = [list(replay(make_search(name, list(TABLE), seed), TABLE, 70, batch=4)) for seed in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.slow
def test_gp_learns_and_is_reproducible() -> None:
    table = {config: TABLE[config] for config in shuffled(TABLE, 0)}
    runs = [list(replay(OptunaSearch(list(table), "gp", seed=3, warm=10), table, 40)) for _ in range(2)]
    assert runs[0] == runs[1]
    early, late = ([t for c in part if (t := table[c]) is not None] for part in (runs[0][:10], runs[0][30:]))
    assert statistics.median(late) < statistics.median(early)


def test_first_proposals_follow_the_analytic_model() -> None:
    ranked = sorted(TABLE, key=lambda config: TABLE[config] or math.inf)
    search = OptunaSearch(ranked, "tpe", seed=0, warm=12)
    search.observe(ranked[2], TABLE[ranked[2]])
    assert search.propose(11) == [*ranked[:2], *ranked[3:12]]


@pytest.mark.parametrize(("candidates", "warm"), [(3, 8), (100, 10), (5000, 32)])
def test_default_warm(candidates: int, warm: int) -> None:
    assert default_warm(candidates) == warm


def test_tpe_beats_random() -> None:
    regrets = {name: [regret(name, TABLE, 80, seed) for seed in range(9)] for name in ("tpe", "random")}
    assert statistics.median(regrets["tpe"]) < statistics.median(regrets["random"])


@pytest.mark.parametrize(("sampler", "seeds"), [("tpe", 9), pytest.param("gp", 1, marks=pytest.mark.slow)])
def test_sampler_learns_from_failures(sampler: str, seeds: int) -> None:
    share = sum(t is None for t in TABLE.values()) / len(TABLE)
    failed = []
    for seed in range(seeds):
        search = OptunaSearch(shuffled(TABLE, seed), sampler, seed, warm=20)
        learnt = list(replay(search, TABLE, 60))[20:]
        failed.append(sum(TABLE[config] is None for config in learnt) / len(learnt))
    assert statistics.mean(failed) < share


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("working", [0, 1, len(SMALL)])
def test_search_covers_the_list_whatever_fails(sampler: str, warm: int, working: int) -> None:
    table: Table = {config: 7.0 if (i - 9) % len(SMALL) < working else None for i, config in enumerate(SMALL)}
    assert len(list(replay(OptunaSearch(list(SMALL), sampler, 0, warm=warm), table, 100, batch=2))) == len(SMALL)


@pytest.mark.slow
def test_two_hundred_proposals_over_thousands_take_seconds() -> None:
    table = gemm_like(blocks=(32, 64, 96, 128, 160, 192, 224, 256))
    big = {Config(template=c.template, params={**c.params, "cluster": n}): t for c, t in table.items() for n in (1, 2)}
    assert len(big) > 3000
    start = time.perf_counter()
    assert len(list(replay(make_search("tpe", list(big), seed=0), big, 200, batch=8))) == 200
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("name", ["", "grid", "TPE"])
def test_unknown_search_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError, match="use one of tpe, random, exhaustive, qmc, gp"):
        make_search(name, list(SMALL), seed=0)


@pytest.mark.parametrize(("sampler", "package"), [("tpe", "optuna"), ("qmc", "scipy"), ("gp", "torch")])
def test_missing_package_is_named(sampler: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ToolchainError, match=rf"'{sampler}' needs the package {package}.*pip install {package}"):
        make_search(sampler, list(SMALL), seed=0)


def test_module_imports_no_optuna() -> None:
    script = "import sys, tlxgen.tuner.search; print({'optuna', 'torch', 'scipy'} & set(sys.modules) or 'none')"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {script}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "none"


@pytest.mark.parametrize(
    ("candidates", "trials", "expected"),
    [(64, None, "exhaustive"), (64, 10, "exhaustive"), (65, None, "tpe"), (65, 65, "exhaustive"), (65, 64, "tpe")],
)
def test_small_space_is_searched_in_full(candidates: int, trials: int | None, expected: str) -> None:
    assert effective_sampler("tpe", candidates, trials) == expected


def test_exhaustive_keeps_the_order() -> None:
    assert ExhaustiveSearch(list(SMALL)).propose(1000) == list(SMALL)


values = st.one_of(st.booleans(), st.integers(0, 300), st.sampled_from(["x", "y"]))
configs = st.builds(
    Config,
    template=st.sampled_from(["a", "b", "c"]),
    params=st.dictionaries(st.sampled_from(["block", "stages", "mode"]), values, max_size=3),
)


@settings(max_examples=40, deadline=None)
@given(
    table=st.dictionaries(configs, st.none() | st.floats(0.1, 1e5), max_size=25),
    name=st.sampled_from(["tpe", "random", "exhaustive", "qmc"]),
    batch=st.integers(1, 6),
    resumed=st.integers(0, 5),
)
def test_any_list_is_proposed_once(table: Table, name: str, batch: int, resumed: int) -> None:
    """Also if one parameter has booleans, numbers and strings, or is missing in some configs."""
    search = make_search(name, list(table), seed=0)
    earlier = list(table)[:resumed]
    for config in earlier:
        search.observe(config, table[config])
    tried = list(replay(search, table, 1000, batch))
    assert len(tried) == len(set(tried))
    assert set(tried) | set(earlier) == set(table)


@given(table=st.lists(configs, min_size=1, max_size=25, unique=True), data=st.data())
def test_candidate_is_nearest_to_itself(table: list[Config], data: st.DataObject) -> None:
    import numpy as np

    grid = _Grid.of(table)
    index = data.draw(st.integers(0, len(table) - 1))
    point = np.maximum(grid.ranks[index], 0).tolist()
    nearest = grid.nearest(point, np.ones(len(table), dtype=bool))
    assert table[nearest].template == table[index].template
    if (grid.ranks >= 0).all():
        assert (grid.ranks[nearest] == grid.ranks[index]).all()  # or differs in a constant
