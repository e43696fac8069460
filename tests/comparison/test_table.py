"""The tables at the end of a comparison."""

import pytest

from eaglelab.comparison import comparison_table


def summary(name, **place):
    place = {"suite": "qa", "tree": "chain", "temperature": 0.0, "batch": 1} | place
    ends = {f"{what}_{end}": value for what in ("tau", "speedup") for end, value in (("low", 1.0), ("high", 3.0))}
    shown = {"tau": 2.0, "speedup": 1.5, "identical": 4, "answers": 4, "same_text_expected": True, "prompts": 4}
    return {"name": name, **place, **ends, **shown}


def contrast(one, other, difference, verdict="no difference shown", measure="tau", **place):
    place = {"suite": "qa", "tree": "chain", "temperature": 0.0, "batch": 1} | place
    ends = {"difference_low": difference - 0.1, "difference_high": difference + 0.1}
    return {
        "measure": measure,
        "one": one,
        "other": other,
        **place,
        "difference": difference,
        **ends,
        "verdict": verdict,
        "prompts": 4,
        "tests": 1,
    }


RUN = {"seed": 0, "steps": 1234, "supervised_rows": 5, "flops": None, "seconds": 3.0, "parameters": None}


def results(summaries, contrasts):
    names = dict.fromkeys(row["name"] for row in summaries)
    runs = [RUN | {"name": name, "simulated_tau": 2.5, "real_chain_tau": None} for name in names]
    return {"runs": runs, "summary": summaries, "contrasts": contrasts}


def test_a_shown_difference_is_marked_and_no_other():
    rows = [
        contrast("b", "a", 0.5, "higher"),
        contrast("c", "a", -0.5, "lower"),
        contrast("c", "b", -0.1),
    ]
    text = comparison_table(results([summary(name) for name in "abc"], rows))
    (line,) = (line for line in text.splitlines() if line.startswith("tau "))
    assert line.split()[4:] == [
        "+0.50",
        "+0.40",
        "to",
        "+0.60*",
        "-0.50",
        "-0.60",
        "to",
        "-0.40*",
        "-0.10",
        "-0.20",
        "to",
        "+0.00",
    ]
    assert "no difference shown" in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize(("second", "lines"), [(0.5, 1), (0.6, 2)], ids=["same", "another"])
def test_tau_stands_once_where_the_batch_changes_nothing(second, lines):
    rows = [contrast("b", "a", 0.5), contrast("b", "a", second, batch=8)]
    rows += [contrast("b", "a", 0.5, measure="speedup", batch=batch) for batch in (1, 8)]
    text = comparison_table(results([summary(name, batch=batch) for batch in (1, 8) for name in "ab"], rows))
    table = text[text.index("paired") :].splitlines()[3:]
    assert len(table) == lines + 2 + 1  # and a line about four questions
    assert ("all" in table[0]) == (lines == 1)


def test_more_pairs_than_fit_go_below():
    names = "abcd"
    rows = [contrast(one, other, 0.1) for i, other in enumerate(names) for one in names[i + 1 :]]
    text = comparison_table(results([summary(name) for name in names], rows))
    assert sum(line.startswith("tau ") for line in text.splitlines()) == 2
    for row in rows:
        assert f"{row['one']} - {row['other']}" in text


def test_too_few_questions_for_a_test_are_told():
    """Four questions can be swapped in 16 ways, two of which are the extreme ones."""
    rows = [contrast("b", "a", 0.5)]
    said = "4 questions and 1 test leave no corrected p below 0.12"
    assert said in comparison_table(results([summary(name) for name in "ab"], rows))
    rows[0]["prompts"] = 12
    assert "leave no corrected p" not in comparison_table(results([summary(name) for name in "ab"], rows))


def test_sampled_trees_and_missing_numbers_are_told():
    row = summary("a", tree="sampled") | {"same_text_expected": False, "tau": None, "tau_low": None}
    text = comparison_table(results([row], []))
    assert "4 of 4*" in text
    assert "keeps the law of the text" in text
    assert "paired" not in text
