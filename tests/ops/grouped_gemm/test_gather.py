"""Form gather of grouped GEMM: rows of A wherever they are, as often as asked for, and none that nobody asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.grouped_gemm.test_operator import SPREADS, Call, call, config, spread
from tlxgen import devices, ops
from tlxgen.codegen import loader
from tlxgen.codegen.emit import emit
from tlxgen.config import Config
from tlxgen.errors import InvalidProblemError
from tlxgen.ops.grouped_gemm.problem import GroupedGemmProblem
from tlxgen.simulator.check import check
from tlxgen.space import search_space
from tlxgen.space.candidates import candidates

GROUPED = ops.get("grouped_gemm")
H200 = devices.target("h200")
NAN = float("nan")
WILD = 10**9  # as a row's number: far outside every tensor here

both = pytest.mark.parametrize("template", GROUPED.templates)


def moved(one: Call, rows: list[int], a: torch.Tensor) -> Call:
    """The call of other rows."""
    return replace(one, inputs={**one.inputs, "a": a, "rows": torch.tensor(rows, dtype=torch.int32)})


class TestProblem:
    def test_has_a_label_and_rows_of_any_number(self) -> None:
        made = spread([3, 0, 7], 16, 32, "gather", layout="nt", epilogue="bias+swiglu")
        assert GroupedGemmProblem.from_label(made.label) == made
        assert (made.shapes["b"], made.shapes["c"]) == ((3, 32, 16), (10, 8))
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        assert sorted(inputs["rows"].tolist()) == list(range(10))
        for count in (1, 5, 500):
            assert GROUPED.check_call(made, {**inputs, "a": inputs["a"].new_zeros(count, 32)}) is None

    def test_counts_the_bytes_that_say_where_rows_are(self) -> None:
        made, sorted_ = (spread([3, 0, 7], 5, 11, form) for form in ("gather", "2d3d"))
        assert GROUPED.bytes_moved(made) == GROUPED.bytes_moved(sorted_) + 4 * 10
        assert GROUPED.flops(made) == GROUPED.flops(sorted_)

    @pytest.mark.parametrize("layout", ["tn", "tt"])
    def test_takes_contiguous_rows_alone(self, layout: str) -> None:
        with pytest.raises(InvalidProblemError, match="rows of A, which must be contiguous"):
            spread([3, 5], 16, 32, "gather", layout=layout)

    def test_names_what_does_not_fit(self) -> None:
        made = spread([3, 7], 16, 32, "gather")
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        out = GROUPED.output(made, inputs)
        assert "rows has shape (10,) and dtype torch.int64" in str(
            GROUPED.check_call(made, {**inputs, "rows": inputs["rows"].long()})
        )
        assert "a has shape (10, 31)" in str(GROUPED.check_call(made, {**inputs, "a": inputs["a"][:, :31]}))
        without = {name: x for name, x in inputs.items() if name != "rows"}
        assert "rows is missing" in str(GROUPED.check_call(made, without))
        assert "rows has no place in form 2d3d" in str(GROUPED.check_call(spread([3, 7], 16, 32), inputs))
        tma, vanilla = (config(made, template) for template in GROUPED.templates)
        apart = torch.zeros(20, dtype=torch.int32)[::2]
        assert "not contiguous" in str(GROUPED.launchable(made, tma, {**inputs, "rows": apart}, out))
        by_eights = {**inputs, "a": torch.zeros(10, 40, dtype=torch.bfloat16)[:, :32]}
        assert "multiple of 16" in str(GROUPED.launchable(made, tma, by_eights, out))
        assert GROUPED.launchable(made, vanilla, by_eights, out) is None
        odd = spread([3, 7], 16, 40, "gather")
        assert "a_row_bytes" in str(search_space.why_illegal(GROUPED, odd, config(odd, tma.template), H200))

    def test_the_reference_is_the_product_of_the_gathered_rows(self) -> None:
        made, sorted_ = (spread([5, 0, 9], 16, 24, form, epilogue="bias+silu") for form in ("gather", "2d3d"))
        inputs = dict(GROUPED.inputs(made, "cpu", 0))
        rows = inputs["rows"]
        assert rows.tolist() != sorted(rows.tolist())
        in_order = {**inputs, "a": inputs["a"][rows]}
        assert torch.equal(GROUPED.reference(made, inputs), GROUPED.reference(sorted_, in_order))
        assert torch.equal(GROUPED.eager(made, inputs), GROUPED.eager(sorted_, in_order))


@both
class TestKernels:
    """In the simulator."""

    @pytest.mark.parametrize("sizes", SPREADS.values(), ids=SPREADS)
    def test_rows_are_the_right_ones_however_tokens_are_spread(self, template: str, sizes: list[int]) -> None:
        call(spread(sizes, 72, 96, "gather"), template).check()

    @pytest.mark.parametrize(
        ("n", "k", "changes", "options"),
        [
            (264, 272, {"block_m": 128, "block_n": 256, "epilogue_subtiles": 2, "walk": "during"}, {}),
            (136, 720, {"block_m": 128, "walk": "during", "num_stages": 4}, {"epilogue": "bias+geglu"}),
            (72, 16, {"num_stages": 5}, {"epilogue": "bias+swiglu"}),  # one step a tile: copies of several under way
            (77, 80, {}, {"epilogue": "relu", "dtype": "fp16"}),
        ],
    )
    def test_other_shapes_knobs_and_epilogues(
        self, template: str, n: int, k: int, changes: dict[str, Any], options: dict[str, Any]
    ) -> None:
        changes = changes if template == "grouped_gemm_tma" else {}
        call(spread([130, 0, 31, 1, 257], n, k, "gather", layout="nt", **options), template, **changes).check()

    def test_rows_may_repeat_and_be_few(self, template: str) -> None:
        one = call(spread([70, 0, 30], 72, 96, "gather"), template)
        moved(one, [(7 * i) % 5 for i in range(100)], one.inputs["a"][:5].clone()).check()

    def test_nobody_feels_rows_that_it_did_not_ask_for(self, template: str) -> None:
        """The first row, which stands in for those past an expert's last, and those of the other experts, are NaN."""
        sizes = [40, 90, 3]
        one = call(spread(sizes, 72, 96, "gather"), template)
        rows = [1 + (11 * i) % 200 for i in range(133)]
        a = torch.full((300, 96), NAN, dtype=torch.bfloat16)
        own = rows[40:130]
        a[own] = torch.randn(90, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
        out = moved(one, rows, a).run()
        assert out[40:130].isfinite().all()
        assert out[:40].isnan().any()  # the others did ask for them
        clean = moved(one, rows, a.nan_to_num(0.0)).run()
        assert torch.equal(out[40:130], clean[40:130])

    def test_tokens_past_the_last_end_are_not_looked_up(self, template: str) -> None:
        one = call(spread([40, 30, 20], 72, 64, "gather"), template)
        whole = one.run()
        cut = replace(one, inputs={**one.inputs, "offs": torch.tensor([40, 70, 75], dtype=torch.int32)})
        cut.inputs["rows"] = cut.inputs["rows"].clone()
        cut.inputs["rows"][75:] = WILD
        out = cut.run()
        assert torch.equal(out[:75], whole[:75])
        assert out[75:].isnan().all()

    def test_what_lies_behind_a_row_is_not_read(self, template: str) -> None:
        """K ends within a step, and the rows of A are parts of longer ones that are NaN beyond."""
        one = call(spread([70, 5], 72, 80, "gather"), template)
        expected = one.run()
        wide = torch.full((75, 96), NAN, dtype=torch.bfloat16)
        wide[:, :80] = one.inputs["a"]
        assert torch.equal(moved(one, one.inputs["rows"].tolist(), wide[:, :80]).run(), expected)

    def test_the_emitted_file_checks_itself(self, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """With torch in place of the kernel, which only a GPU runs: the check is right, and sees a wrong row."""
        sizes = (0, 9, 1, 0, 30)
        made = spread(sizes, 24, 48, "gather", layout="nt", epilogue="swiglu")
        module = loader.load(emit(GROUPED, made, config(made, template)))
        shift = 0

        def launch(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor, offs: torch.Tensor, c: torch.Tensor) -> None:
            inputs = {"a": a, "b": b, "rows": rows, "offs": offs}
            assert GROUPED.check_call(made, inputs) is None
            assert GROUPED.launchable(made, Config(template=GROUPED.templates[1], params={}), inputs, c) is None
            c.copy_(GROUPED.reference(made, {**inputs, "rows": rows.roll(shift)}))

        monkeypatch.setattr(module, "launch", launch)
        torch.manual_seed(0)
        error, library = module.check(sizes, 24, 48, device="cpu")
        assert 0 < error <= library < 5e-3
        shift = 1
        assert module.check(sizes, 24, 48, device="cpu")[0] > 0.5


def test_a_favourite_is_clean_and_a_copy_announced_too_early_is_not() -> None:
    """Under several schedules: what the producer waits for before it says that rows have landed is what decides."""
    made = spread([128] * 64, 2048, 4096, "gather", layout="nt")
    source = emit(GROUPED, made, candidates(made, H200)[0])
    report = check(source, 3)
    assert report.clean, "\n".join(map(str, report.findings))
    early = replace(source, text=source.text.replace("async_load_wait_group(LAG)", "async_load_wait_group(LAG + 1)"))
    assert early.text != source.text
    kinds = {finding.kind for finding in check(early, 3).findings}
    assert kinds & {"data_race", "unwritten_shared"}
