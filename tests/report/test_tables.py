"""Tables as Markdown and LaTeX, and how numbers are written."""

import re

import pytest

from eaglelab.report.tables import Column, Entry, Table, between, file_name, latex, markdown, number, percent


def table():
    made = Table("a-name", "50 % of_it & more", [Column("drafter", number=False), Column("tau", "per round")])
    made.add([Entry("eagle_3 | <b>", drafter="eagle_3"), Entry("3.94", "3.77 to 4.12")], start=True)
    made.add(["a\nb", number(-0.5, sign=True)], start=True)
    return made


def test_markdown():
    assert markdown(table()).splitlines() == [
        "50 % of_it & more",
        "",
        "| drafter | tau, per round |",
        "| --- | ---: |",
        "| eagle_3 \\| &lt;b> | 3.94 (3.77 to 4.12) |",
        "| a b | \N{MINUS SIGN}0.50 |",
    ]


def test_latex():
    text = latex(table())
    assert "\\caption{50 \\% of\\_it \\& more}" in text
    assert "\\begin{tabular}{lr}" in text
    assert "eagle\\_3 | <b> & 3.94 {\\scriptsize (3.77 to 4.12)} \\\\" in text
    assert "a b & $-$0.50 \\\\" in text
    assert text.count("\\addlinespace") == 1, "between groups"
    assert re.findall(r"\\(top|mid|bottom)rule", text) == ["top", "mid", "bottom"]
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("character", list("&%$#_{}~^\\"))
def test_latex_leaves_no_special_character(character):
    made = Table("t", "c", [Column("x")])
    made.add([f"a{character}b"])
    (line,) = [line for line in latex(made).splitlines() if line.lstrip().startswith("a")]
    cell = line.strip().removesuffix(" \\\\")
    assert re.sub(r"\\text\w+\{\}|\\[&%$#_{}]", "", cell) == "ab"


def test_columns_without_a_value():
    made = Table("t", "c", [Column("a"), Column("b"), Column("c")])
    made.add(["1", number(None), "2"])
    made.add([number(None), number(None), "3"])
    made.drop_unknown()
    assert [column.title for column in made.columns] == ["a", "c"]
    assert [[entry.text for entry in row] for row in made.rows] == [["1", "2"], [number(None), "3"]]


def test_numbers():
    assert number(1234567.891) == "1,234,567.89"
    assert number(-1.5, 1) == "\N{MINUS SIGN}1.5"
    assert number(0.25, sign=True, unit="x") == "+0.25x"
    assert number(None) == percent(None) == "\N{EN DASH}"
    assert percent(0.12345) == "12.3%"
    assert between((1, 2.5), 1, unit="x") == "1.0x to 2.5x"
    assert between(None) == between((None, 2)) == ""
    assert file_name("tau", "a b/c", "T0.7") == "tau-a_b_c-T0.7"
