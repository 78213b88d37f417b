"""Configs that were stored before a parameter of their search space was added or removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.recorded import InstantPool, RecordedCard
from tlxgen import ops, paths
from tlxgen.codegen.compile import Binary
from tlxgen.codegen.emit import emit
from tlxgen.codegen.facts import Facts
from tlxgen.config import Config
from tlxgen.db import shipped
from tlxgen.db.record import Trial, TunedRecord, tuning_key
from tlxgen.db.store import Store
from tlxgen.db.validity import is_tuned, why_stale
from tlxgen.devices import target
from tlxgen.regress import rows
from tlxgen.runtime import kernel, selection
from tlxgen.space import absent, search_space
from tlxgen.space.candidates import candidates
from tlxgen.tuner import compile_pool, tune
from tlxgen.tuner.measure import PROTOCOL
from tlxgen.tuner.result import Budget, TuneResult

H200 = target("h200")
ADD = ops.get("vector_add")
PROBLEM = ADD.problem((4096,))
KEY = tuning_key(PROBLEM, H200.key)
OPERATOR, TEMPLATE = "vector_add", "vector_add_vanilla"
OLD = Config(template=TEMPLATE, params={"block": 2048, "num_warps": 4})
NEW = Config(template=TEMPLATE, params={"block": 2048, "num_warps": 4, "cached": 0})

Grow = Callable[..., None]


@pytest.fixture
def grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grow]:
    """Adds the parameter `cached` to template and search space; emitted code is another only where it is `marked`."""

    def grow(parameter: str = "{choices: [0, 1], absent: 0}", marked: str = "cached") -> None:
        for name in ("TEMPLATES", "SEARCH_SPACES"):
            shutil.copytree(getattr(paths, name), tmp_path / name)
            monkeypatch.setattr(paths, name, tmp_path / name)
        insert(tmp_path / "SEARCH_SPACES" / OPERATOR / f"{TEMPLATE}.yaml", "parameters:\n", f"  cached: {parameter}\n")
        mark = f"{{% if {marked} %}}\nCACHED = True\n{{% endif %}}\n"
        insert(tmp_path / "TEMPLATES" / OPERATOR / f"{TEMPLATE}.py.j2", "import triton.language as tl\n", mark)
        kernel.forget()

    yield grow
    kernel.forget()


def insert(file: Path, behind: str, text: str) -> None:
    before = file.read_text()
    assert behind in before
    file.write_text(before.replace(behind, behind + text, 1))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "tuned.db") as store:
        yield store


def a_row(config: Config = OLD) -> TunedRecord:
    """A measured row of the code that is emitted now."""
    return TunedRecord(
        key=KEY,
        config=config,
        origin="measured",
        source_hash=emit(ADD, PROBLEM, config).code_hash,
        time_us=5.0,
        peer="torch",
        peer_us=5.0,
        error=0.0,
        protocol=PROTOCOL,
    )


def a_trial(config: Config, **changes: Any) -> Trial:
    fields = {"config": config, "source_hash": emit(ADD, PROBLEM, config).code_hash, "protocol": PROTOCOL}
    return Trial.model_validate({**fields, "status": "ok", "time_us": 5.0, "peer_us": 5.0, **changes})


class TestCompleted:
    def test_a_config_gets_what_it_lacks(self, grow: Grow) -> None:
        grow()
        assert absent.completed(OLD) == NEW

    def test_what_a_config_says_stays(self, grow: Grow) -> None:
        grow()
        said = Config(template=TEMPLATE, params={**OLD.params, "cached": 1})
        assert absent.completed(said) is said

    @pytest.mark.parametrize("value", ["true", "2", "'far'"])
    def test_values_keep_their_types(self, value: str, grow: Grow) -> None:
        grow(f"{{choices: [{value}], absent: {value}}}")
        for _ in range(2):  # read, then noted
            absent._values.cache_clear()
            (found,) = {repr(v) for k, v in absent.completed(OLD).params.items() if k == "cached"}
            assert found == {"true": "True", "2": "2", "'far'": "'far'"}[value]

    def test_a_parameter_that_says_nothing_completes_nothing(self, grow: Grow) -> None:
        grow("{choices: [0, 1], why: it is absent from older configs}")
        assert absent.completed(OLD) is OLD
        assert (
            search_space.why_outside(ADD, OLD)
            == f"{TEMPLATE} needs parameter 'cached'; give all of cached, block, num_warps"
        )

    @pytest.mark.parametrize("template", ["", "dreamt_of", "../vector_add_vanilla", "\0", "a" * 5000])
    def test_templates_that_nobody_knows_are_left_alone(self, template: str, grow: Grow) -> None:
        grow()
        config = Config(template=template, params={})
        assert absent.completed(config) is config

    @pytest.mark.parametrize("parameter", ["{choices: [0, 1], absent: 7}", "{absent: 0}", "{absent"])
    def test_a_broken_space_completes_nothing_and_is_told_where_it_is_asked(self, parameter: str, grow: Grow) -> None:
        grow(parameter)
        assert absent.completed(OLD) is OLD
        with pytest.raises(ValueError, match=r"search space .*vector_add_vanilla\.yaml"):
            search_space.why_outside(ADD, OLD)

    def test_the_second_process_reads_no_search_space(self, grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
        """It takes tens of milliseconds to import what does."""
        grow()
        absent.completed(OLD)
        absent._values.cache_clear()
        monkeypatch.setattr(search_space, "load", None)
        assert absent.completed(OLD) == NEW


class TestRetired:
    """`cached` was a parameter once; all kernels now have `cached` = 0."""

    @pytest.fixture
    def retire(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grow]:
        def retire(value: str = "0") -> None:
            shutil.copytree(paths.SEARCH_SPACES, tmp_path / "spaces")
            monkeypatch.setattr(paths, "SEARCH_SPACES", tmp_path / "spaces")
            line = f"retired: {{cached: {value}}}\n"
            insert(tmp_path / "spaces" / OPERATOR / f"{TEMPLATE}.yaml", f"template: {TEMPLATE}\n", line)
            kernel.forget()

        yield retire
        kernel.forget()

    def test_a_config_with_the_value_that_is_left_loses_the_parameter(self, retire: Grow) -> None:
        retire()
        for _ in range(2):  # from the search space, then from the note
            absent._values.cache_clear()
            assert absent.completed(NEW) == OLD
        assert absent.completed(OLD) is OLD

    @pytest.mark.parametrize(("left", "stored"), [("0", 1), ("1", True), ("0", "0"), ("'off'", "on")])
    def test_a_config_with_another_value_is_illegal(self, left: str, stored: Any, retire: Grow) -> None:
        retire(left)
        config = Config(template=TEMPLATE, params={**OLD.params, "cached": stored})
        assert absent.completed(config) is config
        reason = f"{TEMPLATE}: cached = {stored!r} was removed; kernels now have cached = {left}, leave it out"
        assert search_space.why_outside(ADD, config) == reason

    def test_a_stored_row_is_read_without_the_parameter_and_served(
        self, store: Store, retire: Grow, no_shipped_configs: None
    ) -> None:
        old = a_row().model_copy(update={"config": NEW})
        store.put(old)
        retire()
        found = store.get(KEY)
        assert found is not None
        assert (found.config, store.defective()) == (OLD, {})
        assert why_stale(found) is None
        choice = selection.select(PROBLEM, H200)
        assert (choice.origin, choice.config) == ("tuned", OLD)

    def test_a_retired_name_that_is_a_parameter_is_refused(self, tmp_path: Path) -> None:
        space = {"template": "x", "summary": "s", "parameters": {"a": [1]}, "retired": {"a": 1}}
        with pytest.raises(ValueError, match="retired: 'a' is still a parameter"):
            search_space.Space.model_validate(space)


class TestRows:
    def test_a_stored_row_is_read_with_the_parameter_and_served(
        self, store: Store, grow: Grow, no_shipped_configs: None
    ) -> None:
        store.put(a_row())
        grow()
        found = store.get(KEY)
        assert found is not None
        assert (found.config, store.defective()) == (NEW, {})
        assert store.records() == [found]
        assert why_stale(found) is None
        assert is_tuned(PROBLEM, H200, store)
        choice = selection.select(PROBLEM, H200)
        assert (choice.origin, choice.config) == ("tuned", NEW)

    def test_one_whose_code_is_another_now_is_stale(self, store: Store, grow: Grow) -> None:
        """Its hash says so, whatever value the space says it had."""
        store.put(a_row())
        grow(marked="cached == 0")
        found = store.get(KEY)
        assert found is not None
        assert found.config == NEW
        assert "emits other code" in (why_stale(found) or "")

    def test_one_that_is_not_what_was_stored_is_a_miss_as_before(self, store: Store, grow: Grow) -> None:
        store.put(a_row())
        with store._transaction() as db:
            db.execute("UPDATE tuned SET config = replace(config, '2048', '4096')")
        grow()
        with pytest.warns(match="its config is not the one that was stored"):
            assert store.get(KEY) is None

    def test_a_shipped_row_is_imported_and_passes_the_gate(
        self, store: Store, grow: Grow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "shipped").mkdir()
        monkeypatch.setattr(paths, "SHIPPED_CACHE", tmp_path / "shipped")
        file = tmp_path / "shipped" / "h200.jsonl"
        shipped.dump([a_row()], file)
        assert '"cached"' not in file.read_text()
        grow()
        assert shipped.import_shipped(store) == 1
        assert [record.config for record in store.records()] == [NEW]

        facts = Facts.model_construct()
        (outcome,) = rows.examine(rows.read(file), lambda jobs: [Binary(source, facts, 0.0) for source, _ in jobs])
        assert outcome.findings == ()


class TestTuning:
    @pytest.fixture
    def run(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TuneResult, RecordedCard]]:
        def run(trials: int = 1000, **times: float) -> tuple[TuneResult, RecordedCard]:
            """On a card where configs take longer the larger their blocks are, but for those that are `cached`."""
            legal = candidates(PROBLEM, H200, (TEMPLATE,))
            by_config = {c: float(c.params["block"]) for c in legal}
            by_config |= {c: times["cached"] for c in legal if c.params.get("cached") and "cached" in times}
            card = RecordedCard(by_config, 5000.0)
            monkeypatch.setattr(tune, "Runner", lambda *_, **__: card)
            monkeypatch.setattr(compile_pool, "CompilePool", lambda *_, **__: InstantPool())
            return tune.tune(PROBLEM, store, budget=Budget(trials, 600), templates=(TEMPLATE,)), card

        return run

    def test_goes_on_with_the_new_values_alone(self, run: Any, store: Store, grow: Grow) -> None:
        before, _ = run()
        n = before.state.tried
        grow()
        after, card = run()
        assert (after.state.resumed, after.state.tried, after.state.legal) == (n, 2 * n, 2 * n)
        assert {config.params["cached"] for config in card.gated[:n]} == {1}
        assert after.record.config == absent.completed(before.record.config), "it was the best, and is no slower"

    def test_replaces_the_old_row_by_what_is_faster(self, run: Any, store: Store, grow: Grow) -> None:
        before, _ = run()
        grow()
        after, _ = run(cached=100.0)
        assert after.record.config.params["cached"] == 1
        assert absent.completed(before.record.config) in after.finalists
        assert store.get(KEY) == after.record

    def test_counts_a_config_once_that_an_older_tlxgen_tried_too(self, run: Any, store: Store, grow: Grow) -> None:
        store.add_trial(KEY, a_trial(OLD, status="hang", time_us=None))
        store.add_trial(KEY, a_trial(OLD, protocol=f"{PROTOCOL}/gate"))
        grow()
        store.add_trial(KEY, a_trial(NEW, status="hang", time_us=None))
        result, card = run()
        assert (result.state.resumed, result.state.failures) == (1, {"hang": 1})
        assert NEW not in card.gated

    def test_begins_anew_where_the_space_does_not_say_what_old_configs_had(self, run: Any, grow: Grow) -> None:
        run()
        grow("[0, 1]")
        assert run()[0].state.resumed == 0
