from __future__ import annotations

import json

import pytest

from fp8kit.conversion.report import Record, Report, table
from fp8kit.errors import ConversionError

MIB = 2**20


def report() -> Report:
    records = [
        Record("a.fc", "Linear", (512, 1024), "convert", "", 2 * MIB, MIB, ("b.fc",)),
        Record("head", "Linear", (10, 512), "skip", "output head", MIB, MIB),
        Record("odd", "Odd", (512, 512), "skip", "a subclass", MIB, MIB, warning=True),
    ]
    return Report("FP8_DYNAMIC", records, 5 * MIB, ["A note."])


def test_sizes_follow_from_the_records() -> None:
    r = report()
    assert [x.name for x in r.converted] == ["a.fc"]
    assert [x.name for x in r.skipped] == ["head", "odd"]
    assert r.model_bytes_after == 4 * MIB


def test_summary_is_one_line() -> None:
    assert report().summary() == (
        "FP8_DYNAMIC: 1 layer converted, 2 skipped; 5.0 MiB -> 4.0 MiB; "
        "60% of the original bytes stay in high precision"
    )


def test_layers_that_are_fp8_already_are_not_in_high_precision() -> None:
    r = report()
    r.records.append(Record("a.old", "Fp8Linear", (512, 2048), "skip", "already FP8", MIB, MIB))
    assert r.summary().endswith("; 40% of the original bytes stay in high precision")


def test_an_empty_report_has_a_summary() -> None:
    text = "FP8: 0 layers converted, 0 skipped; 0.0 MiB -> 0.0 MiB; 0% of the original bytes"
    assert Report("FP8").summary().startswith(text)
    assert str(Report("FP8")).splitlines()[0].split() == "layer weight action MiB note".split()


def test_text_is_a_table_with_notes_and_summary() -> None:
    r = report()
    lines = str(r).splitlines()
    assert lines[0].split() == ["layer", "weight", "action", "MiB", "note"]
    assert set(lines[1]) == {"-", " "}
    assert lines[2].split() == "a.fc 512x1024 convert 2.00 -> 1.00 also b.fc".split()
    assert lines[3].split() == "head 10x512 skip 1.00 output head".split()
    assert lines[5:] == ["A note.", r.summary()]


def test_layers_that_share_an_input_say_so() -> None:
    r = report()
    r.records.append(Record("a.up", "Linear", (512, 1024), "convert", "", 2 * MIB, MIB))
    r.groups = [("a.fc", "a.up")]
    lines = str(r).splitlines()
    assert lines[2].endswith("also b.fc; shares its input with up")
    assert lines[5].endswith("shares its input with fc")


def test_data_survives_json() -> None:
    r = report()
    data = json.loads(json.dumps(r.to_dict()))
    assert data["model_bytes_after"] == 4 * MIB
    assert data["notes"] == ["A note."]
    assert [x["name"] for x in data["records"]] == ["a.fc", "head", "odd"]
    assert data["records"][0]["aliases"] == ["b.fc"]
    assert data["records"][2]["warning"] is True


def test_table_aligns_columns_without_trailing_spaces() -> None:
    text = table([("a", "b"), ("long", "1"), ("", "22")])
    assert text == "a     b\n----  --\nlong  1\n      22"


def test_strict_refuses_by_name_what_deserves_attention() -> None:
    r = report()
    blocked = [x for x in r.skipped if x.warning]
    assert len(r.skipped) > len(blocked) == 1  # what was excluded on purpose is no obstacle
    with pytest.raises(ConversionError) as error:
        r.refuse_blocked()
    assert str(error.value).startswith(
        f"strict=True, and 1 layer cannot be converted:\n  odd: {blocked[0].reason}\n"
    )
    r.records.remove(blocked[0])
    r.refuse_blocked()
