"""Results in Gradescope's format, by a schema written from its documentation."""

from __future__ import annotations

import json

import jsonschema
import pytest

from common.course.grading.marks import Grade, Mark

# https://gradescope-autograders.readthedocs.io/en/latest/specs/#output-format
STATUS = {"enum": ["passed", "failed"]}
VISIBILITY = {"enum": ["hidden", "after_due_date", "after_published", "visible"]}
FORMAT = {"enum": ["text", "html", "simple_format", "md", "ansi"]}
SCHEMA = {
    "type": "object",
    "anyOf": [{"required": ["score"]}, {"required": ["tests"]}],
    "additionalProperties": False,
    "properties": {
        "score": {"type": "number", "minimum": 0},
        "execution_time": {"type": "number"},
        "output": {"type": "string"},
        "output_format": FORMAT,
        "test_output_format": FORMAT,
        "test_name_format": FORMAT,
        "visibility": VISIBILITY,
        "stdout_visibility": VISIBILITY,
        "extra_data": {"type": "object"},
        "leaderboard": {"type": "array"},
        "tests": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "score": {"type": "number"},
                    "max_score": {"type": "number"},
                    "status": STATUS,
                    "name": {"type": "string"},
                    "name_format": FORMAT,
                    "number": {"type": "string"},
                    "output": {"type": "string"},
                    "output_format": FORMAT,
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "visibility": VISIBILITY,
                    "extra_data": {"type": "object"},
                },
            },
        },
    },
}
MARKS = (
    Mark("A2.1", "buckets are those of torch", 10, 10.0),
    Mark("A2.4", "buckets are those of torch", 5, 0.0, "Ended: its process has ended"),
    Mark("Q2.1", "the model", 4, None, "somebody has to read it"),
)


@pytest.mark.parametrize("marks", [MARKS, ()])
def test_results_are_what_gradescope_reads(marks: tuple[Mark, ...]) -> None:
    results = Grade("doe-jane-assign2", marks, "namespaces", 7, seconds=12.34).results()
    jsonschema.validate(json.loads(json.dumps(results)), SCHEMA)


def test_what_was_not_judged_is_not_in_the_maximum_and_is_flagged() -> None:
    grade = Grade("doe-jane-assign2", MARKS, "namespaces", 7)
    assert (grade.score, grade.maximum) == (10, 15)
    results = grade.results()
    assert results["extra_data"]["not_judged"] == ["the model"]
    assert [test["max_score"] for test in results["tests"]] == [10, 5, 0]
    assert results["tests"][2]["name"] == "Q2.1: the model (not judged)"
